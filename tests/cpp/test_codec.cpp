// The residual codec without Python or PyTorch: on threads, on every instruction set of this processor, between guard
// bytes at unaligned addresses, against a plain sort. Exits non-zero with one line for each failed expectation.
// tools/sanitize.sh runs it under ASan + UBSan and under TSan.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "kernels/cpu_dispatch.h"
#include "kernels/residual_codec.h"

namespace {

using moe_opt::codec_blocks;
using moe_opt::codec_index_words;
using moe_opt::DType;
using moe_opt::kCodecBlock;
namespace cpu = moe_opt::cpu;

// One thread for every part: more than the module would ever use.
void on_threads(int64_t count, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// A float32 array at an odd address between guard bytes that must survive.
class Array {
 public:
  explicit Array(int64_t size) : size_(size), bytes_(2 * kMargin + size * 4, kGuard) {}
  uint8_t* data() { return bytes_.data() + kMargin; }
  void set(int64_t i, float value) { std::memcpy(data() + 4 * i, &value, 4); }
  float get(int64_t i) {
    float value;
    std::memcpy(&value, data() + 4 * i, 4);
    return value;
  }
  bool guards_intact() const {
    const auto guard = [](uint8_t byte) { return byte == kGuard; };
    return std::all_of(bytes_.begin(), bytes_.begin() + kMargin, guard) &&
           std::all_of(bytes_.begin() + kMargin + size_ * 4, bytes_.end(), guard);
  }

 private:
  static constexpr int64_t kMargin = 65;
  static constexpr uint8_t kGuard = 0xa5;
  int64_t size_;
  std::vector<uint8_t> bytes_;
};

struct Entry {
  int64_t element;
  float residual;
};

// The k largest by magnitude, the first ones among equals, in ascending order of elements.
std::vector<Entry> largest(Array& expert, Array& shared, int64_t numel, int64_t k) {
  std::vector<Entry> entries;
  for (int64_t i = 0; i < numel; ++i) entries.push_back({i, expert.get(i) - shared.get(i)});
  const auto size = [](const Entry& entry) { return entry.residual < 0 ? -entry.residual : entry.residual; };
  std::stable_sort(entries.begin(), entries.end(), [&](const Entry& a, const Entry& b) { return size(a) > size(b); });
  entries.resize(k);
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.element < b.element; });
  return entries;
}

void test_codec(const char* isa, int64_t numel, int64_t k, int64_t num_ranges, bool ties) {
  std::mt19937 rng(static_cast<unsigned>(numel + k));
  std::normal_distribution<float> normal;
  Array expert(numel), shared(numel), out(numel), values(k);
  for (int64_t i = 0; i < numel; ++i) {
    expert.set(i, ties ? static_cast<float>(rng() % 5) : normal(rng));
    shared.set(i, ties ? 1.0f : normal(rng));
  }
  std::vector<uint16_t> indices(codec_index_words(numel, k), 0xa5a5);
  cpu::sr_encode(DType::kFloat32, numel, expert.data(), shared.data(), k, values.data(), indices.data(), num_ranges,
                 on_threads);

  const std::vector<Entry> expected = largest(expert, shared, numel, k);
  const int64_t blocks = codec_blocks(numel);
  std::vector<int64_t> ends(blocks, 0);
  for (const Entry& entry : expected) ++ends[entry.element / kCodecBlock];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  bool same = true;
  for (int64_t b = 0; b < blocks; ++b) {
    same &= indices[2 * b] == (ends[b] & 0xffff) && indices[2 * b + 1] == ends[b] >> 16;
  }
  expect(same, "block ends", isa);
  for (int64_t i = 0; i < k; ++i) {
    same &= indices[2 * blocks + i] == expected[i].element % kCodecBlock && values.get(i) == expected[i].residual;
  }
  expect(same, "entries", isa);
  expect(values.guards_intact(), "bytes around the values", isa);
  expect(cpu::codec_ends_valid(numel, indices.data(), k), "valid ends", isa);
  expect(blocks == 0 || !cpu::codec_ends_valid(numel, indices.data(), k + 1), "ends of other entries", isa);

  std::atomic<bool> ok{true};
  for (int64_t i = 0; i < numel; ++i) out.set(i, shared.get(i));
  on_threads(blocks, [&](int64_t b) {
    if (!cpu::sr_decode(DType::kFloat32, numel, values.data(), indices.data(), out.data(), b, b + 1)) ok = false;
  });
  expect(ok, "places in order", isa);
  for (const Entry& entry : expected) shared.set(entry.element, shared.get(entry.element) + entry.residual);
  expect(std::memcmp(out.data(), shared.data(), numel * 4) == 0, "decoded", isa);
  expect(out.guards_intact(), "bytes around the output", isa);

  // Places that do not ascend, or lie behind the end, are found out and reach no other memory.
  if (blocks != 1 || k < 2) return;
  for (const int64_t forged : {int64_t{0}, int64_t{indices[k]}, numel}) {
    if (forged >= kCodecBlock) continue;
    indices.back() = static_cast<uint16_t>(forged);
    const bool accepted = cpu::sr_decode(DType::kFloat32, numel, values.data(), indices.data(), out.data(), 0, 1);
    expect(!accepted, "forged places are found out", isa);
    expect(out.guards_intact(), "bytes around the output of forged places", isa);
  }
}

}  // namespace

int main() {
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!cpu::select_kernels(isa)) {
      std::printf("skipped [%s]: not on this processor\n", isa);
      continue;
    }
    for (const int64_t stream_threshold : {int64_t{-1}, int64_t{0}}) {  // outputs that bypass the caches, too
      cpu::set_stream_threshold(stream_threshold);
      for (const bool ties : {false, true}) {
        test_codec(isa, 0, 0, 1, ties);
        test_codec(isa, 1, 1, 4, ties);
        test_codec(isa, 37, 20, 4, ties);
        test_codec(isa, 5000, 5000, 1, ties);
        test_codec(isa, kCodecBlock, 700, 4, ties);
        test_codec(isa, 3 * kCodecBlock + 21, 4000, 3, ties);  // large enough for a sample
        test_codec(isa, 3 * kCodecBlock + 21, 3 * kCodecBlock, 8, ties);
      }
    }
    cpu::set_stream_threshold(-1);
  }
  return exit_status("codec");
}
