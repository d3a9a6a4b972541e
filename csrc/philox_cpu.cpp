// Addressed random numbers on the CPU: initial weights (philox_normal) and dropout decisions (philox_keep).
//
// A row of numbers has consecutive addresses, and four of them share a counter. A thread makes a stretch of a row at a
// time: first all its counters' words, into a buffer in the first-level cache, then the numbers. Both loops are plain and
// are vectorised for each instruction set; the coefficients of an octave are gathered from the table.
#include <torch/csrc/stable/library.h>

#include "common/cpu.h"
#include "common/tensors.h"
#include "philox.h"

namespace megatron_lite {
namespace {

constexpr int64_t kStretch = 1024;  // numbers at a time

// The words at addresses [first, first + 4 * counters), first a multiple of 4. Without `above`, parts 2 and 3 of the
// counter are 0 and part 1 is the high half of address / 4.
ML_FN void make_words(uint32_t* __restrict words, int64_t counters, uint64_t first, const uint32_t* above, uint32_t k0,
                      uint32_t k1) {
  const uint64_t begin = first / 4;
  for (int64_t b = 0; b < counters; ++b) {
    const uint64_t block = begin + uint64_t(b);
    const uint32_t c1 = above != nullptr ? above[0] : uint32_t(block >> 32);
    const uint32_t c2 = above != nullptr ? above[1] : 0, c3 = above != nullptr ? above[2] : 0;
    uint32_t w0, w1, w2, w3;
    philox4x32(uint32_t(block), c1, c2, c3, k0, k1, w0, w1, w2, w3);
    words[4 * b] = w0;
    words[4 * b + 1] = w1;
    words[4 * b + 2] = w2;
    words[4 * b + 3] = w3;
  }
}

struct Normal {
  static ML_FN void run(float* __restrict out, const double* __restrict table, int64_t address, int64_t length,
                        uint32_t k0, uint32_t k1, double std) {
    uint32_t words[kStretch + 8];
    const int64_t skip = address & 3;
    make_words(words, (skip + length + 3) / 4, uint64_t(address - skip), nullptr, k0, k1);
    for (int64_t i = 0; i < length; ++i) out[i] = float(normal_of(words[skip + i], table) * std);
  }
};

struct Keep {
  static ML_FN void run(uint8_t* __restrict keep, int64_t address, int64_t length, const uint32_t* above, uint32_t k0,
                        uint32_t k1, uint64_t threshold) {
    uint32_t words[kStretch + 8];
    const int64_t skip = address & 3;
    make_words(words, (skip + length + 3) / 4, uint64_t(address - skip), above, k0, k1);
    const uint32_t least = uint32_t(threshold);
    const uint8_t none = threshold > 0xffffffffu ? 0 : 1;  // p = 1: nothing is kept
    for (int64_t i = 0; i < length; ++i) keep[i] = uint8_t(words[skip + i] >= least) & none;
  }
};

// f(row, first element, length) for every stretch of every row, on all threads.
template <class F>
void for_stretches(int64_t rows, int64_t length, const F& f) {
  const int64_t per_row = (length + kStretch - 1) / kStretch;
  parallel(rows * per_row, kGrain / (4 * std::min(kStretch, std::max<int64_t>(length, 1))),
           [&](int64_t begin, int64_t end) {
             for (int64_t unit = begin; unit < end; ++unit) {
               const int64_t first = unit % per_row * kStretch;
               f(unit / per_row, first, std::min(kStretch, length - first));
             }
           });
}

void normal(Tensor out, const Tensor table, const Tensor start, int64_t key0, int64_t key1, double std,
            int64_t isa) {
  const int64_t rows = start.numel(), length = rows > 0 ? out.numel() / rows : 0;
  float* values = pointer<float>(out, rows * length, "out");
  const double* coefficients = pointer<double>(table, 32 * (kOrder + 1), "table");
  const int64_t* addresses = pointer<int64_t>(start, rows, "start");
  for_stretches(rows, length, [&](int64_t row, int64_t first, int64_t n) {
    run_for_isa<Normal>(isa, values + row * length + first, coefficients, addresses[row] + first, n, uint32_t(key0),
                        uint32_t(key1), std);
  });
}

void keep(Tensor out, const Tensor start, const Tensor above1, const Tensor above2, const Tensor above3, int64_t key0,
          int64_t key1, int64_t threshold, int64_t isa) {
  const int64_t rows = start.numel(), length = rows > 0 ? out.numel() / rows : 0;
  auto* decisions = reinterpret_cast<uint8_t*>(pointer<bool>(out, rows * length, "out"));
  const int64_t* addresses = pointer<int64_t>(start, rows, "start");
  const int64_t* parts[3] = {pointer<int64_t>(above1, rows, "above1"), pointer<int64_t>(above2, rows, "above2"),
                             pointer<int64_t>(above3, rows, "above3")};
  for_stretches(rows, length, [&](int64_t row, int64_t first, int64_t n) {
    const uint32_t above[3] = {uint32_t(parts[0][row]), uint32_t(parts[1][row]), uint32_t(parts[2][row])};
    run_for_isa<Keep>(isa, decisions + row * length + first, addresses[row] + first, n,
                      static_cast<const uint32_t*>(above), uint32_t(key0), uint32_t(key1), uint64_t(threshold));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("philox_normal", TORCH_BOX(&normal));
  m.impl("philox_keep", TORCH_BOX(&keep));
}

}  // namespace megatron_lite
