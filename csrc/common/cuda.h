// What the CUDA kernels share: 16-byte loads, sums over the threads of a row, launches.
//
// The kernels are also compiled by an ordinary C++ compiler against a header that runs a grid on the CPU, thread by thread
// (tests/cuda_on_cpu.h): their logic is tested where there is no GPU. Hence the two macros for what C++ cannot parse.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define ML_LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define ML_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#else
#include "cuda_on_cpu.h"
#endif

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "launch.h"
#include "numbers.h"

namespace megatron_lite {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int64_t kMostBlocks = 4096;  // of a grid that strides over its work; several waves on any card

// N elements that are loaded and stored as one.
template <class S, int N>
struct alignas(N * sizeof(S)) Pack {
  S v[N];
};

// Elements of S in 16 bytes.
template <class S>
constexpr int kVector = 16 / int(sizeof(S));

template <int N, class S>
ML_FN Pack<S, N> load(const S* p) {
  return *reinterpret_cast<const Pack<S, N>*>(p);
}
template <int N, class S>
ML_FN void store(S* p, const Pack<S, N>& pack) {
  *reinterpret_cast<Pack<S, N>*>(p) = pack;
}

inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % uintptr_t(bytes) == 0; }

inline int64_t blocks_for(int64_t work, int64_t per_block) {
  const int64_t blocks = (work + per_block - 1) / per_block;
  return blocks < 1 ? 1 : blocks < kMostBlocks ? blocks : kMostBlocks;
}

// The sum of v over the THREADS (a warp, or the whole block) that work on one row; all of them get it.
template <int THREADS, class C>
__device__ inline C sum_over_row(C v) {
  static_assert(THREADS == kWarp || THREADS == kThreads, "a row has a warp or a block");
  for (int other = kWarp / 2; other > 0; other /= 2) v = v + __shfl_xor_sync(0xffffffffu, v, other);
  if (THREADS == kWarp) return v;
  __shared__ C warps[kThreads / kWarp];
  __syncthreads();  // the last use of `warps` is over
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = v;
  __syncthreads();
  C sum = warps[0];
  for (int w = 1; w < kThreads / kWarp; ++w) sum = sum + warps[w];
  return sum;
}

template <class S>
struct Type {
  using type = S;
};

// f(Type<S>{}) for a dtype; its result is the error code.
template <class F>
int with_dtype(int dtype, const F& f) {
  switch (dtype) {
    case kFloat32:
      return f(Type<float>{});
    case kFloat64:
      return f(Type<double>{});
    case kBfloat16:
      return f(Type<bf16>{});
    default:
      return f(Type<fp16>{});
  }
}

}  // namespace megatron_lite
