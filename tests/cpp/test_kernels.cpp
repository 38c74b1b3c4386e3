// The CPU kernels and the memory pool without Python or PyTorch: ranges of tokens on threads, every instruction set of
// this processor, unaligned and padded rows with guard bytes around them, and offsets past 2^31. Exits non-zero with
// one line for each failed expectation. tools/sanitize.sh runs it under ASan + UBSan and under TSan.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "kernels/chunk_copy.h"
#include "kernels/count_tokens.h"
#include "kernels/cpu_dispatch.h"
#include "kernels/host_pool.h"
#include "kernels/permute.h"
#include "kernels/sum_parts.h"
#include "kernels/wire_format.h"

namespace {

using moe_opt::ConstRows;
using moe_opt::DType;
using moe_opt::MutableRows;
using moe_opt::RowMap;
namespace cpu = moe_opt::cpu;

// Splits [0, n) over threads, as the Python module does over PyTorch's.
void in_parallel(int64_t n, const std::function<void(int64_t, int64_t)>& body) {
  constexpr int64_t kThreads = 4;
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back(body, n * i / kThreads, n * (i + 1) / kThreads);
  }
  for (std::thread& thread : threads) thread.join();
}

struct Map {
  std::vector<int64_t> offsets, rows, sources;
  std::vector<int32_t> experts;
  RowMap view(int64_t num_experts) const {
    return {static_cast<int64_t>(offsets.size()) - 1,
            num_experts,
            static_cast<int64_t>(rows.size()),
            offsets.data(),
            rows.data(),
            experts.data()};
  }
};

// The row map of a routing map, built in two ranges side by side.
Map build_map(const std::vector<uint8_t>& routing, int64_t num_tokens, int64_t num_experts) {
  Map map;
  const cpu::ForEach side_by_side = [](int64_t count, const std::function<void(int64_t)>& body) {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) threads.emplace_back(body, i);
    for (std::thread& thread : threads) thread.join();
  };
  cpu::RowMapBuilder builder(routing.data(), num_tokens, num_experts, num_tokens / 2 + 1, side_by_side);
  map.offsets.resize(num_tokens + 1);
  std::vector<int64_t> expert_counts(num_experts);
  const int64_t rows = builder.count(map.offsets.data(), expert_counts.data());
  map.rows.resize(rows);
  map.sources.resize(rows);
  map.experts.resize(rows);
  builder.fill(map.rows.data(), map.experts.data(), map.sources.data());
  return map;
}

// A matrix with a chosen stride and misalignment between guard bytes that must survive.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t row_bytes, int64_t stride, int64_t misalignment)
      : rows_(rows), row_bytes_(row_bytes), stride_(stride), start_(64 + misalignment) {
    bytes_.assign(start_ + rows * stride + 64, kGuard);
  }
  uint8_t* row(int64_t r) { return bytes_.data() + start_ + r * stride_; }
  ConstRows in() { return {row(0), stride_}; }
  MutableRows out() { return {row(0), stride_}; }
  void set(int64_t r, int64_t h, float value) { std::memcpy(row(r) + h * 4, &value, 4); }
  float get(int64_t r, int64_t h) {
    float value;
    std::memcpy(&value, row(r) + h * 4, 4);
    return value;
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  bool guards_intact() const {
    bool intact = true;
    const auto check = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) intact &= bytes_[i] == kGuard;
    };
    check(0, start_);
    for (int64_t r = 0; r < rows_; ++r) check(start_ + r * stride_ + row_bytes_, start_ + (r + 1) * stride_);
    check(start_ + rows_ * stride_, static_cast<int64_t>(bytes_.size()));
    return intact;
  }

 private:
  static constexpr uint8_t kGuard = 0xa5;
  int64_t rows_, row_bytes_, stride_, start_;
  std::vector<uint8_t> bytes_;
};

std::vector<uint8_t> random_routing(int64_t num_tokens, int64_t num_experts, double density, std::mt19937& rng) {
  std::bernoulli_distribution routed(density);
  std::vector<uint8_t> routing(num_tokens * num_experts);
  for (uint8_t& byte : routing) byte = routed(rng) ? 1 + rng() % 255 : 0;
  return routing;
}

void test_row_kernels(const char* isa, int64_t num_tokens, int64_t num_experts, int64_t hidden, int64_t padding,
                      int64_t misalignment) {
  std::mt19937 rng(static_cast<unsigned>(num_tokens * 31 + hidden));
  std::normal_distribution<float> normal;
  const auto routing = random_routing(num_tokens, num_experts, 0.3, rng);
  const Map storage = build_map(routing, num_tokens, num_experts);
  const RowMap map = storage.view(num_experts);
  int64_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (routing[t * num_experts + e] != 0) expect(storage.sources[row++] == t, "row order", isa);
    }
  }
  expect(row == map.num_rows, "row count", isa);

  const int64_t row_bytes = hidden * 4, stride = row_bytes + padding, lane = 16;
  Matrix tokens(num_tokens, row_bytes, stride, misalignment), sums(num_tokens, row_bytes, stride, misalignment);
  Matrix packed(map.num_rows, row_bytes + lane, row_bytes + lane, misalignment);
  Matrix grads(map.num_rows, row_bytes, stride, misalignment);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < hidden; ++h) tokens.set(t, h, normal(rng));
  }
  std::vector<float> probs(num_tokens * num_experts), grad_probs(probs.size(), 1.0f), back(probs.size(), 1.0f);
  for (float& prob : probs) prob = normal(rng);

  const MutableRows lanes{packed.row(0) + row_bytes, row_bytes + lane};
  in_parallel(num_tokens, [&](int64_t begin, int64_t end) {
    cpu::permute_rows(map, DType::kFloat32, DType::kFloat32, hidden, tokens.in(), packed.out(), probs.data(), 4, lanes,
                      lane, begin, end);
  });
  in_parallel(num_tokens, [&](int64_t begin, int64_t end) {
    cpu::unpermute_rows(map, DType::kFloat32, hidden, packed.in(), probs.data(), sums.out(), begin, end);
    cpu::unpermute_probs(map, {lanes.data, lanes.stride_bytes}, 4, back.data(), begin, end);
    cpu::unpermute_rows_backward(map, DType::kFloat32, hidden, tokens.in(), packed.in(), probs.data(), grads.out(),
                                 grad_probs.data(), begin, end);
  });

  std::vector<float> expected(hidden);
  for (int64_t t = 0; t < num_tokens; ++t) {
    expected.assign(hidden, 0.0f);
    std::vector<float> expected_back(num_experts, 0.0f), expected_grad(num_experts, 0.0f);
    for (int64_t i = map.offsets[t]; i < map.offsets[t + 1]; ++i) {
      const int64_t r = map.rows[i];
      const float prob = probs[t * num_experts + map.experts[i]];
      uint8_t wanted_lane[16] = {};
      std::memcpy(wanted_lane, &prob, 4);
      expect(std::memcmp(packed.row(r), tokens.row(t), row_bytes) == 0, "permuted row", isa);
      expect(std::memcmp(packed.row(r) + row_bytes, wanted_lane, lane) == 0, "probability lane", isa);
      double dot = 0.0;
      for (int64_t h = 0; h < hidden; ++h) {
        const volatile float term = tokens.get(t, h) * prob;  // volatile: rounded before it is added
        expected[h] += term;
        expect(grads.get(r, h) == term, "gradient of a row", isa);
        dot += static_cast<double>(tokens.get(t, h)) * tokens.get(t, h);
      }
      expected_grad[map.experts[i]] = static_cast<float>(dot);
      expected_back[map.experts[i]] = prob;
    }
    for (int64_t h = 0; h < hidden; ++h) expect(sums.get(t, h) == expected[h], "weighted sum", isa);
    for (int64_t e = 0; e < num_experts; ++e) {
      const float got = grad_probs[t * num_experts + e];
      expect(std::fabs(got - expected_grad[e]) <= 1e-5f * expected_grad[e], "gradient of a probability", isa);
      expect(back[t * num_experts + e] == expected_back[e], "probability moved back", isa);
    }
  }
  expect(packed.guards_intact() && sums.guards_intact() && grads.guards_intact(), "bytes around the rows", isa);
}

void test_padded_map() {
  std::mt19937 rng(3);
  const int64_t num_tokens = 37, num_experts = 5;
  for (const double density : {0.0, 0.2, 0.9, 1.0}) {
    for (const int64_t capacity : {0, 1, 9, 37}) {
      const auto routing = random_routing(num_tokens, num_experts, density, rng);
      const int64_t num_rows = capacity * num_experts;
      std::vector<int64_t> offsets(num_tokens + 1), rows(num_rows), sources(num_rows), from_offsets(offsets),
          from_rows(rows);
      std::vector<int32_t> experts(num_rows), from_experts(experts);
      cpu::build_padded_row_map(routing.data(), num_tokens, num_experts, capacity, offsets.data(), rows.data(),
                                experts.data(), sources.data());
      for (int64_t e = 0; e < num_experts; ++e) {
        std::vector<int64_t> wanted;
        for (const bool routed : {true, false}) {
          for (int64_t t = 0; t < num_tokens; ++t) {
            if ((routing[t * num_experts + e] != 0) == routed) wanted.push_back(t);
          }
        }
        wanted.resize(capacity);
        expect(std::equal(wanted.begin(), wanted.end(), sources.begin() + e * capacity), "padded sources", "map");
      }
      const int64_t bad =
          cpu::build_row_map_from_sources(sources.data(), num_rows, num_tokens, capacity > 0 ? capacity : 1,
                                          from_offsets.data(), from_rows.data(), from_experts.data());
      expect(bad == -1 && from_offsets == offsets && from_rows == rows && from_experts == experts,
             "map from sources equals padded map", "map");
    }
  }
  const int64_t outside[] = {0, 3};
  int64_t offsets[4], rows[2];
  expect(cpu::build_row_map_from_sources(outside, 2, 3, 0, offsets, rows, nullptr) == 1, "source outside", "map");
}

// Two tokens whose permuted rows lie more than 2^31 bytes and, with a 4-byte element, 2^31 elements apart: the address
// space is reserved, and only the pages of those rows are ever touched.
void test_offsets_past_32_bits(const char* isa) {
  const int64_t stride = int64_t{5} << 31, hidden = 33, row_bytes = hidden * 4, num_rows = 3;
  const int64_t reserved = stride * (num_rows - 1) + 4096;
  void* base = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    std::printf("skipped [%s]: %lld bytes of address space are not to be had\n", isa, static_cast<long long>(reserved));
    return;
  }
  const int64_t offsets[] = {0, 1, 3}, rows[] = {2, 0, 1};
  const int32_t experts[] = {2, 0, 1};
  const RowMap map{2, 3, num_rows, offsets, rows, experts};
  std::vector<float> tokens(2 * hidden), sums(2 * hidden);
  for (int64_t i = 0; i < 2 * hidden; ++i) tokens[i] = static_cast<float>(i + 1);
  uint8_t* far = static_cast<uint8_t*>(base);
  cpu::permute_rows(map, DType::kFloat32, DType::kFloat32, hidden, {tokens.data(), row_bytes}, {far, stride}, nullptr,
                    0, {nullptr, 0}, 0, 0, 2);
  expect(std::memcmp(far + 2 * stride, tokens.data(), row_bytes) == 0, "row past 2^33 bytes", isa);
  expect(std::memcmp(far + stride, tokens.data() + hidden, row_bytes) == 0, "row past 2^31 elements", isa);
  cpu::unpermute_rows(map, DType::kFloat32, hidden, {far, stride}, nullptr, {sums.data(), row_bytes}, 0, 2);
  for (int64_t h = 0; h < hidden; ++h) {
    expect(sums[h] == tokens[h] && sums[hidden + h] == 2 * tokens[hidden + h], "sum of far rows", isa);
  }
  const int64_t source_rows[] = {2, 1}, target_rows[] = {0, 1}, counts[] = {1, 1};
  cpu::copy_chunks({2, source_rows, target_rows, counts}, row_bytes, {far, stride}, {sums.data(), row_bytes}, 2, 0, 2);
  expect(sums == tokens, "chunks of far rows", isa);
  munmap(base, reserved);
}

void test_chunks(const char* isa) {
  const int64_t source_rows[] = {0, 7, 7, 20}, target_rows[] = {13, 0, 0, 10}, counts[] = {7, 0, 10, 3};
  const moe_opt::ChunkList chunks{4, source_rows, target_rows, counts};
  for (const int64_t row_bytes : {1, 3, 64, 300, 1025}) {
    for (const int64_t padding : {0, 5}) {
      Matrix source(23, row_bytes, row_bytes + padding, 3), target(20, row_bytes, row_bytes + padding, 1);
      for (int64_t r = 0; r < 23; ++r) std::memset(source.row(r), static_cast<int>(r + 1), row_bytes);
      in_parallel(20, [&](int64_t begin, int64_t end) {
        cpu::copy_chunks(chunks, row_bytes, source.in(), target.out(), 20, begin, end);
      });
      for (int64_t c = 0; c < 4; ++c) {
        for (int64_t i = 0; i < counts[c]; ++i) {
          expect(std::memcmp(target.row(target_rows[c] + i), source.row(source_rows[c] + i), row_bytes) == 0,
                 "chunk row", isa);
        }
      }
      expect(target.guards_intact(), "bytes around the chunks", isa);
    }
  }
}

// Rows in a dtype to a format of the wire and back: one by one, gathered, in chunks, in permute, and in sums. Whatever
// it has written is added to `written`, which is to be the same under every instruction set.
void test_wire(const char* isa, DType dtype, DType format, int64_t hidden, int64_t padding,
               std::vector<uint8_t>& written) {
  constexpr int64_t kRows = 23, kExperts = 5, kLane = 16;
  std::mt19937 rng(static_cast<unsigned>(hidden * 31 + padding));
  std::normal_distribution<float> normal;
  const int64_t element = moe_opt::element_size(dtype), payload = moe_opt::payload_bytes(format, hidden);
  Matrix tokens(kRows, hidden * element, hidden * element + padding, padding);
  for (int64_t r = 0; r < kRows; ++r) {
    const int scale = static_cast<int>(rng() % 200) - 100;
    for (int64_t h = 0; h < hidden; ++h) {
      float value = r == 0 ? 0.0f : std::ldexp(normal(rng), r == 2 ? -140 : scale);
      if (r == 1 && h % 9 == 4) value = h % 2 == 0 ? NAN : -INFINITY;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (dtype == DType::kBFloat16) bits >>= 16;
      if (dtype == DType::kFloat16) bits = rng() & 0xbfffu;  // finite
      std::memcpy(tokens.row(r) + h * element, &bits, element);
    }
  }

  Matrix narrow(kRows, payload, payload + padding, padding);
  Matrix values(kRows, hidden * 4, hidden * 4 + padding, padding);
  Matrix gathered(kRows, hidden * element, hidden * element, 0);
  std::vector<int64_t> sources(kRows);
  for (int64_t& source : sources) source = static_cast<int64_t>(rng() % kRows);
  in_parallel(kRows, [&](int64_t begin, int64_t end) {
    cpu::convert_rows(dtype, format, hidden, tokens.in(), nullptr, narrow.out(), kRows, begin, end);
  });
  in_parallel(kRows, [&](int64_t begin, int64_t end) {
    cpu::convert_rows(format, DType::kFloat32, hidden, narrow.in(), nullptr, values.out(), kRows, begin, end);
    cpu::convert_rows(format, dtype, hidden, narrow.in(), sources.data(), gathered.out(), kRows, begin, end);
  });
  if (dtype == DType::kFloat32) {
    const int64_t block = moe_opt::has_scales(format) ? moe_opt::block_elements(format) : 1;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t h = 0; h < hidden; ++h) {
        float most = 0.0f;
        for (int64_t i = h / block * block; i < std::min(h / block * block + block, hidden); ++i) {
          if (std::isfinite(tokens.get(r, i))) most = std::max(most, std::fabs(tokens.get(r, i)));
        }
        const float x = tokens.get(r, h), value = values.get(r, h);
        const float bound = std::max({0x1p-4f * std::fabs(x), 0x1p-17f * most, r == 2 ? 0x1p-133f : 0.0f});
        expect(std::isfinite(x) ? std::fabs(value - x) <= bound : !std::isfinite(value), "bound of a format", isa);
        float of_source;
        std::memcpy(&of_source, gathered.row(r) + h * 4, 4);
        const float wanted = values.get(sources[r], h);
        expect(std::memcmp(&of_source, &wanted, 4) == 0, "gathered row", isa);
      }
    }
  }

  const int64_t from_rows[] = {0, 7, 7, 20}, to_rows[] = {13, 0, 0, 10}, counts[] = {7, 0, 10, 3};
  const moe_opt::ChunkList chunks{4, from_rows, to_rows, counts};
  Matrix moved(20, payload, payload + padding, padding), back(20, hidden * element, hidden * element + padding, 0);
  in_parallel(20, [&](int64_t begin, int64_t end) {
    cpu::convert_chunks(chunks, dtype, format, hidden, tokens.in(), moved.out(), 20, begin, end);
    cpu::convert_chunks(chunks, format, dtype, hidden, narrow.in(), back.out(), 20, begin, end);
  });
  for (int64_t c = 0; c < 4; ++c) {
    for (int64_t i = 0; i < counts[c]; ++i) {
      expect(std::memcmp(moved.row(to_rows[c] + i), narrow.row(from_rows[c] + i), payload) == 0, "chunk row", isa);
    }
  }

  const Map storage = build_map(random_routing(kRows, kExperts, 0.4, rng), kRows, kExperts);
  const RowMap map = storage.view(kExperts);
  std::vector<float> probs(kRows * kExperts, 0.5f);
  Matrix packed(map.num_rows, payload + kLane, payload + kLane, padding);
  const MutableRows lanes{packed.row(0) + payload, payload + kLane};
  in_parallel(kRows, [&](int64_t begin, int64_t end) {
    cpu::permute_rows(map, dtype, format, hidden, tokens.in(), packed.out(), probs.data(), 4, lanes, kLane, begin, end);
  });
  for (int64_t r = 0; r < map.num_rows; ++r) {
    expect(std::memcmp(packed.row(r), narrow.row(storage.sources[r]), payload) == 0, "permuted row", isa);
  }
  Matrix rows(map.num_rows, hidden * element, hidden * element, 0), sums(kRows, hidden * element, hidden * element, 0);
  Matrix first(kRows, payload, payload + padding, padding), onward(kRows, payload, payload, padding);
  in_parallel(kRows, [&](int64_t begin, int64_t end) {
    cpu::permute_rows(map, dtype, dtype, hidden, tokens.in(), rows.out(), nullptr, 0, {nullptr, 0}, 0, begin, end);
  });
  in_parallel(kRows, [&](int64_t begin, int64_t end) {
    cpu::sum_rows(map, dtype, format, hidden, rows.in(), first.out(), begin, end);      // at the experts
    cpu::sum_rows(map, format, format, hidden, packed.in(), onward.out(), begin, end);  // on the way
    cpu::sum_rows(map, format, dtype, hidden, packed.in(), sums.out(), begin, end);     // at home
  });

  Matrix doubled(kRows, hidden * 4, hidden * 4, 0);
  Matrix total(narrow);
  const ConstRows parts[] = {total.in(), narrow.in()};  // summed where the first is
  in_parallel(kRows, [&](int64_t begin, int64_t end) {
    cpu::sum_parts(format, hidden, parts, 2, total.out(), begin, end);
    cpu::convert_rows(format, DType::kFloat32, hidden, total.in(), nullptr, doubled.out(), kRows, begin, end);
  });
  for (int64_t r = 3; r < kRows; ++r) {
    for (int64_t h = 0; h < hidden; ++h) {
      const float wanted = 2 * values.get(r, h);
      expect(std::fabs(doubled.get(r, h) - wanted) <= 1e-6f * std::fabs(wanted), "sum of parts", isa);
    }
  }

  for (const Matrix* matrix :
       {&narrow, &values, &gathered, &moved, &back, &packed, &rows, &first, &onward, &sums, &total}) {
    expect(matrix->guards_intact(), "bytes around the rows", isa);
    written.insert(written.end(), matrix->bytes().begin(), matrix->bytes().end());
  }
}

// All formats of rows on the wire, short blocks and rows at any address.
std::vector<uint8_t> test_wires(const char* isa) {
  std::vector<uint8_t> written;
  for (const DType format : {DType::kBFloat16, DType::kFp8, DType::kMxfp8}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (!moe_opt::converts(dtype, format)) continue;
      for (const int64_t hidden : {1, 31, 128, 131, 300}) {
        for (const int64_t padding : {0, 16, 5}) test_wire(isa, dtype, format, hidden, padding, written);
      }
    }
  }
  return written;
}

// Samples on threads, wide and narrow maps.
void test_counts() {
  std::mt19937 rng(8);
  for (const int64_t num_experts : {1, 16, 300}) {
    const moe_opt::SampleLayout layout{5, 301};
    std::vector<uint8_t> routing_map(layout.num_samples * layout.tokens_per_sample * num_experts);
    std::vector<int64_t> expected(layout.num_samples * num_experts, 0), num(expected.size(), -1);
    for (size_t byte = 0; byte < routing_map.size(); ++byte) {
      routing_map[byte] = rng() % 3 == 0;
      expected[byte % expected.size()] += routing_map[byte];
    }
    in_parallel(layout.num_samples, [&](int64_t begin, int64_t end) {
      cpu::count_routing_map(layout, routing_map.data(), num_experts, num.data(), begin, end);
    });
    expect(num == expected, "counts of a map", "counts");
  }
}

void test_pool() {
  namespace pool = moe_opt::host_pool;
  pool::set_limit(int64_t{8} << 20);
  std::vector<std::thread> threads;
  std::vector<std::atomic<uint8_t*>> mailbox(16);
  for (auto& slot : mailbox) slot = nullptr;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([seed, &mailbox] {
      std::mt19937 rng(seed);
      for (int i = 0; i < 500; ++i) {
        const int64_t bytes = 1 + rng() % (i % 10 == 0 ? 3 << 20 : 5000);
        uint8_t* block = static_cast<uint8_t*>(pool::allocate(bytes));
        block[0] = static_cast<uint8_t>(seed);
        block[bytes - 1] = static_cast<uint8_t>(seed);
        pool::release(mailbox[rng() % mailbox.size()].exchange(block));  // often a block of another thread
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& slot : mailbox) pool::release(slot.exchange(nullptr));
  const moe_opt::HostPoolStats stats = pool::stats();
  expect(stats.used_bytes == 0, "every block came back", "pool");
  expect(stats.cached_bytes > 0 && stats.cached_bytes <= int64_t{8} << 20, "the cache is bounded", "pool");
  expect(stats.hits > 0 && stats.hits + stats.misses == 2000, "hits and misses", "pool");
  pool::set_limit(0);
  expect(pool::stats().cached_bytes == 0, "emptied", "pool");
  pool::set_limit(int64_t{3} << 20);
  void* blocks[] = {pool::allocate(1 << 20), pool::allocate(2 << 20), pool::allocate(1 << 20)};
  for (void* block : blocks) pool::release(block);
  expect(pool::stats().cached_bytes == int64_t{3} << 20, "the first block is gone", "pool");
  void *small = pool::allocate(1 << 20), *large = pool::allocate(2 << 20);
  expect(small == blocks[2] && large == blocks[1], "the other two are kept", "pool");
  pool::release(small);
  pool::release(large);
}

}  // namespace

int main() {
  std::vector<uint8_t> on_wires;
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!cpu::select_kernels(isa)) {
      std::printf("skipped [%s]: not on this processor\n", isa);
      continue;
    }
    for (const int64_t hidden : {1, 15, 64, 131, 512}) {
      for (const int64_t padding : {0, 16, 5}) test_row_kernels(isa, 61, 11, hidden, padding, padding);
    }
    test_row_kernels(isa, 0, 4, 8, 0, 0);
    // Outputs that bypass the caches.
    cpu::set_stream_threshold(0);
    for (const int64_t hidden : {15, 512, 513}) test_row_kernels(isa, 61, 11, hidden, 0, 0);
    test_chunks(isa);
    const std::vector<uint8_t> past_caches = test_wires(isa);
    cpu::set_stream_threshold(-1);
    test_offsets_past_32_bits(isa);
    test_chunks(isa);
    if (on_wires.empty()) on_wires = test_wires(isa);
    expect(past_caches == on_wires && test_wires(isa) == on_wires, "the same bytes on the wire", isa);
  }
  test_padded_map();
  test_counts();
  test_pool();
  return exit_status("kernel");
}
