// RMS norm on CUDA, forward and backward. rms_norm_cpu.cpp has the formulas.
//
// A row of up to 1,024 features (qk-norm's heads) has a warp of its own, a longer one a block of 256 threads; either reads
// 16 bytes at a time where pointers and length allow it. A row is walked over twice, the second time out of the cache.
//
// The gradient of the weight is a sum over rows. A block takes every gridDim-th row and adds grad * xhat into shared
// memory, where every thread owns its columns (and every warp its own copy, when rows belong to warps), so there are no
// atomic additions and the order is fixed. Its sums go to a row of `partial`, and a second kernel adds those up. The
// number of blocks is the caller's and depends on the rows only. Shared memory limits the features: 128 KiB of them.
#include "common/cuda.h"

namespace megatron_lite {
namespace {

constexpr int64_t kWarpBytes = 4096;  // of a row in the compute dtype: up to this a warp has a row, else a block

template <class S, class W, int THREADS, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const S* x, const W* weight, compute_t<S> eps, S* y, compute_t<S>* scales, int64_t rows,
                   int64_t hidden) {
  using C = compute_t<S>;
  constexpr int kGroups = kThreads / THREADS;  // rows that a block works on at a time
  const int64_t lane = threadIdx.x % THREADS, group = threadIdx.x / THREADS;
  for (int64_t row = int64_t(blockIdx.x) * kGroups + group; row < rows; row += int64_t(gridDim.x) * kGroups) {
    const S* xr = x + row * hidden;
    C squares = 0;
    for (int64_t i = lane * N; i < hidden; i += THREADS * N) {
      const Pack<S, N> p = load<N>(xr + i);
      for (int k = 0; k < N; ++k) squares = squares + widen(p.v[k]) * widen(p.v[k]);
    }
    const C scale = C(1) / square_root(sum_over_row<THREADS>(squares) / C(hidden) + eps);
    if (lane == 0) scales[row] = scale;
    for (int64_t i = lane * N; i < hidden; i += THREADS * N) {
      const Pack<S, N> p = load<N>(xr + i);
      const Pack<W, N> w = load<N>(weight + i);
      Pack<S, N> o;
      for (int k = 0; k < N; ++k) o.v[k] = narrow<S>(widen(p.v[k]) * scale * C(widen(w.v[k])));
      store<N>(y + row * hidden + i, o);
    }
  }
}

template <class S, class W, int THREADS, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const S* grad, const S* x, const W* weight, const compute_t<S>* scales, S* grad_x,
                    compute_t<S>* partial, int64_t rows, int64_t hidden) {
  using C = compute_t<S>;
  constexpr int kGroups = kThreads / THREADS;
  ML_DYNAMIC_SHARED(shared);
  C* const sums = reinterpret_cast<C*>(shared);  // [groups, hidden]
  const int64_t lane = threadIdx.x % THREADS, group = threadIdx.x / THREADS;
  C* const mine = sums + group * hidden;
  for (int64_t i = lane * N; i < hidden; i += THREADS * N) {
    for (int k = 0; k < N; ++k) mine[i + k] = 0;
  }
  for (int64_t row = int64_t(blockIdx.x) * kGroups + group; row < rows; row += int64_t(gridDim.x) * kGroups) {
    const S *gr = grad + row * hidden, *xr = x + row * hidden;
    const C scale = scales[row];
    C products = 0;
    for (int64_t i = lane * N; i < hidden; i += THREADS * N) {
      const Pack<S, N> g = load<N>(gr + i), p = load<N>(xr + i);
      const Pack<W, N> w = load<N>(weight + i);
      for (int k = 0; k < N; ++k) products = products + widen(g.v[k]) * C(widen(w.v[k])) * (widen(p.v[k]) * scale);
    }
    const C mean = sum_over_row<THREADS>(products) / C(hidden);
    for (int64_t i = lane * N; i < hidden; i += THREADS * N) {
      const Pack<S, N> g = load<N>(gr + i), p = load<N>(xr + i);
      const Pack<W, N> w = load<N>(weight + i);
      Pack<S, N> o;
      for (int k = 0; k < N; ++k) {
        const C d = widen(g.v[k]), xhat = widen(p.v[k]) * scale;
        o.v[k] = narrow<S>((d * C(widen(w.v[k])) - xhat * mean) * scale);
        mine[i + k] = mine[i + k] + d * xhat;
      }
      store<N>(grad_x + row * hidden + i, o);
    }
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    C sum = sums[i];
    for (int g = 1; g < kGroups; ++g) sum = sum + sums[g * hidden + i];
    partial[int64_t(blockIdx.x) * hidden + i] = sum;
  }
}

// grad_weight = the sum of partial's rows: a block has 32 columns, 8 threads share one.
template <class C, class W>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const C* partial, W* grad_weight, int64_t blocks, int64_t hidden) {
  constexpr int kParts = kThreads / kWarp;
  __shared__ C sums[kParts][kWarp];
  const int part = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t column = int64_t(blockIdx.x) * kWarp + lane;
  C sum = 0;
  if (column < hidden) {
    for (int64_t b = part; b < blocks; b += kParts) sum = sum + partial[b * hidden + column];
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (part == 0 && column < hidden) {
    for (int p = 1; p < kParts; ++p) sum = sum + sums[p][lane];
    grad_weight[column] = narrow<W>(compute_t<W>(sum));
  }
}

template <class S, class W>
struct Problem {
  using C = compute_t<S>;
  int64_t rows, hidden;
  bool vectors;
  void* stream;

  // f with THREADS and N as constants
  template <class F>
  int with_shape(const F& f) const {
    constexpr int N = kVector<S>;
    const bool warp = hidden * int64_t(sizeof(C)) <= kWarpBytes;
    if (warp && vectors) return f(std::integral_constant<int, kWarp>{}, std::integral_constant<int, N>{});
    if (warp) return f(std::integral_constant<int, kWarp>{}, std::integral_constant<int, 1>{});
    if (vectors) return f(std::integral_constant<int, kThreads>{}, std::integral_constant<int, N>{});
    return f(std::integral_constant<int, kThreads>{}, std::integral_constant<int, 1>{});
  }

  int forward(const S* x, const W* weight, double eps, S* y, C* scale) const {
    return with_shape([&](auto threads, auto n) {
      constexpr int T = decltype(threads)::value, N = decltype(n)::value;
      const auto grid = unsigned(blocks_for(rows, kThreads / T));
      ML_LAUNCH((forward_kernel<S, W, T, N>), grid, kThreads, 0, stream, x, weight, C(eps), y, scale, rows, hidden);
      return int(cudaGetLastError());
    });
  }

  int backward(const S* grad, const S* x, const W* weight, const C* scale, S* grad_x, W* grad_weight, C* partial,
               int64_t blocks) const {
    if (blocks > 0) {
      const int error = with_shape([&](auto threads, auto n) {
        constexpr int T = decltype(threads)::value, N = decltype(n)::value;
        const auto bytes = int(hidden * int64_t(sizeof(C)) * (kThreads / T));
        const auto kernel = backward_kernel<S, W, T, N>;
        if (bytes > 48 * 1024) {  // more than a block gets without asking
          const auto asked = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
          if (asked != cudaSuccess) return int(asked);
        }
        ML_LAUNCH(kernel, unsigned(blocks), kThreads, bytes, stream, grad, x, weight, scale, grad_x, partial, rows,
                  hidden);
        return int(cudaGetLastError());
      });
      if (error != 0) return error;
    }
    const auto grid = unsigned((hidden + kWarp - 1) / kWarp);
    ML_LAUNCH((sum_kernel<C, W>), grid, kThreads, 0, stream, partial, grad_weight, blocks, hidden);
    return int(cudaGetLastError());
  }
};

// f(Type<S>, Type<W>) for a weight of x's dtype or of the dtype that x is computed in.
template <class F>
int with_dtypes(int dtype, int weight_dtype, const F& f) {
  return with_dtype(dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    return weight_dtype == dtype ? f(Type<S>{}, Type<S>{}) : f(Type<S>{}, Type<compute_t<S>>{});
  });
}

template <class S, class W>
bool can_use_vectors(int64_t hidden, std::initializer_list<const void*> tensors, const void* weight) {
  constexpr int N = kVector<S>;
  bool vectors = hidden % N == 0 && aligned(weight, N * sizeof(W));
  for (const void* p : tensors) vectors = vectors && aligned(p, 16);
  return vectors;
}

}  // namespace
}  // namespace megatron_lite

using namespace megatron_lite;

extern "C" int megatron_lite_rms_norm_forward(int dtype, int weight_dtype, const void* x, const void* weight, double eps,
                                              void* y, void* scale, int64_t rows, int64_t hidden, void* stream) {
  if (rows == 0 || hidden == 0) return 0;
  return with_dtypes(dtype, weight_dtype, [&](auto s, auto w) {
    using S = typename decltype(s)::type;
    using W = typename decltype(w)::type;
    const Problem<S, W> problem{rows, hidden, can_use_vectors<S, W>(hidden, {x, y}, weight), stream};
    return problem.forward(static_cast<const S*>(x), static_cast<const W*>(weight), eps, static_cast<S*>(y),
                           static_cast<compute_t<S>*>(scale));
  });
}

extern "C" int megatron_lite_rms_norm_backward(int dtype, int weight_dtype, const void* grad, const void* x,
                                               const void* weight, const void* scale, void* grad_x, void* grad_weight,
                                               void* partial, int64_t blocks, int64_t rows, int64_t hidden,
                                               void* stream) {
  if (hidden == 0) return 0;
  return with_dtypes(dtype, weight_dtype, [&](auto s, auto w) {
    using S = typename decltype(s)::type;
    using W = typename decltype(w)::type;
    using C = compute_t<S>;
    const Problem<S, W> problem{rows, hidden, can_use_vectors<S, W>(hidden, {grad, x, grad_x}, weight), stream};
    return problem.backward(static_cast<const S*>(grad), static_cast<const S*>(x), static_cast<const W*>(weight),
                            static_cast<const C*>(scale), static_cast<S*>(grad_x), static_cast<W*>(grad_weight),
                            static_cast<C*>(partial), blocks);
  });
}
