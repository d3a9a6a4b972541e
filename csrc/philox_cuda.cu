// Addressed random numbers on CUDA: initial weights and dropout decisions. philox.h has the arithmetic, and the bits are
// those of the CPU. A thread makes the four numbers of one counter; a row starts and ends anywhere inside one.
#include "common/cuda.h"
#include "philox.h"

namespace megatron_lite {
namespace {

// f(row, element, word) for the numbers of every counter of every row.
template <class F>
__device__ inline void for_words(const int64_t* start, int64_t rows, int64_t length, uint32_t k0, uint32_t k1,
                                 const int64_t* above1, const int64_t* above2, const int64_t* above3, const F& f) {
  const int64_t per_row = (length + 6) / 4;  // counters; enough for any first address
  const int64_t threads = int64_t(gridDim.x) * kThreads;
  for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < rows * per_row; unit += threads) {
    const int64_t row = unit / per_row;
    const uint64_t block = uint64_t(start[row]) / 4 + uint64_t(unit % per_row);
    const uint32_t c1 = above1 != nullptr ? uint32_t(above1[row]) : uint32_t(block >> 32);
    const uint32_t c2 = above2 != nullptr ? uint32_t(above2[row]) : 0, c3 = above3 != nullptr ? uint32_t(above3[row]) : 0;
    uint32_t w[4];
    philox4x32(uint32_t(block), c1, c2, c3, k0, k1, w[0], w[1], w[2], w[3]);
    for (int k = 0; k < 4; ++k) {
      const int64_t element = int64_t(block * 4) + k - start[row];
      if (element >= 0 && element < length) f(row, element, w[k]);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    normal_kernel(float* out, const double* table, const int64_t* start, int64_t rows, int64_t length, uint32_t k0,
                  uint32_t k1, double std) {
  for_words(start, rows, length, k0, k1, nullptr, nullptr, nullptr, [=](int64_t row, int64_t i, uint32_t word) {
    out[row * length + i] = float(normal_of(word, table) * std);
  });
}

__global__ void __launch_bounds__(kThreads)
    keep_kernel(bool* out, const int64_t* start, const int64_t* above1, const int64_t* above2, const int64_t* above3,
                int64_t rows, int64_t length, uint32_t k0, uint32_t k1, uint64_t threshold) {
  for_words(start, rows, length, k0, k1, above1, above2, above3, [=](int64_t row, int64_t i, uint32_t word) {
    out[row * length + i] = uint64_t(word) >= threshold;
  });
}

}  // namespace
}  // namespace megatron_lite

using namespace megatron_lite;

extern "C" int megatron_lite_philox_normal(float* out, const double* table, const int64_t* start, int64_t rows,
                                           int64_t length, uint32_t key0, uint32_t key1, double std, void* stream) {
  if (rows == 0 || length == 0) return 0;
  const auto grid = unsigned(blocks_for(rows * ((length + 6) / 4), kThreads));
  ML_LAUNCH(normal_kernel, grid, kThreads, 0, stream, out, table, start, rows, length, key0, key1, std);
  return int(cudaGetLastError());
}

extern "C" int megatron_lite_philox_keep(bool* out, const int64_t* start, const int64_t* above1, const int64_t* above2,
                                         const int64_t* above3, int64_t rows, int64_t length, uint32_t key0,
                                         uint32_t key1, uint64_t threshold, void* stream) {
  if (rows == 0 || length == 0) return 0;
  const auto grid = unsigned(blocks_for(rows * ((length + 6) / 4), kThreads));
  ML_LAUNCH(keep_kernel, grid, kThreads, 0, stream, out, start, above1, above2, above3, rows, length, key0, key1,
            threshold);
  return int(cudaGetLastError());
}
