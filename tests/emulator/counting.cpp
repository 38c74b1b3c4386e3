#include "counting.h"

#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace emulator::counting {

bool on = false;

namespace {

constexpr uintptr_t kSector = 32;

std::ostringstream lines;
bool launched = false;

// Of the launch that runs.
uint64_t asked_read = 0, asked_written = 0;
std::unordered_set<uintptr_t> sectors_read, sectors_written;

// Of its block that runs.
std::map<std::pair<int, const void*>, int> accesses;  // of each thread at each place
using Request = std::tuple<int, const void*, int, bool>;
std::map<Request, std::set<uintptr_t>> requests;

void end_launch() {
  if (!launched) return;
  lines << ' ' << asked_read << ' ' << asked_written << ' ' << sectors_read.size() << ' ' << sectors_written.size()
        << '\n';
  asked_read = asked_written = 0;
  sectors_read.clear();
  sectors_written.clear();
  launched = false;
}

}  // namespace

void begin() {
  lines.str("");
  on = true;
}

std::string end() {
  end_launch();
  on = false;
  return lines.str();
}

void memset(size_t bytes) {
  if (!on) return;
  end_launch();
  lines << "memset " << bytes << '\n';
}

void launch(const char* kernel, uint64_t blocks, size_t threads) {
  if (!on) return;
  end_launch();
  launched = true;
  lines << kernel << ' ' << blocks << ' ' << threads;
}

void access(int thread, const void* site, uintptr_t address, size_t bytes, bool reads, bool writes) {
  const int place = accesses[{thread, site}]++;
  for (uintptr_t sector = address / kSector; sector <= (address + bytes - 1) / kSector; ++sector) {
    requests[{thread / 32, site, place, writes}].insert(sector);
    if (reads) sectors_read.insert(sector);
    if (writes) sectors_written.insert(sector);
  }
}

void end_block() {
  if (!on) return;
  for (const auto& [request, sectors] : requests) (std::get<3>(request) ? asked_written : asked_read) += sectors.size();
  accesses.clear();
  requests.clear();
}

}  // namespace emulator::counting
