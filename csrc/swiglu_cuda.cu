// SwiGLU on CUDA: one pass over memory, every element by itself.
//
// A GPU does this at the speed of its memory: forward moves three values per element and backward five, in 16-byte pieces
// where all pointers allow it. The pieces and the elements left over go through the same function, with no contraction
// into fused multiply-adds (nvcc -fmad=false), so that an element's bits do not depend on which of the two it is.
#include "common/cuda.h"
#include "swiglu.h"

namespace megatron_lite {
namespace {

template <class S, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(const S* gate, const S* up, S* out, int64_t n) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
  const int64_t packs = n / N;
  for (int64_t p = thread; p < packs; p += threads) {
    const Pack<S, N> g = load<N>(gate + p * N), u = load<N>(up + p * N);
    Pack<S, N> o;
    for (int k = 0; k < N; ++k) o.v[k] = narrow<S>(swiglu_forward(widen(g.v[k]), widen(u.v[k])));
    store<N>(out + p * N, o);
  }
  for (int64_t i = packs * N + thread; i < n; i += threads) {
    out[i] = narrow<S>(swiglu_forward(widen(gate[i]), widen(up[i])));
  }
}

template <class S, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const S* grad, const S* gate, const S* up, S* grad_gate, S* grad_up, int64_t n) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
  const int64_t packs = n / N;
  compute_t<S> dgate, dup;
  for (int64_t p = thread; p < packs; p += threads) {
    const Pack<S, N> d = load<N>(grad + p * N), g = load<N>(gate + p * N), u = load<N>(up + p * N);
    Pack<S, N> dg, du;
    for (int k = 0; k < N; ++k) {
      swiglu_backward(widen(d.v[k]), widen(g.v[k]), widen(u.v[k]), dgate, dup);
      dg.v[k] = narrow<S>(dgate);
      du.v[k] = narrow<S>(dup);
    }
    store<N>(grad_gate + p * N, dg);
    store<N>(grad_up + p * N, du);
  }
  for (int64_t i = packs * N + thread; i < n; i += threads) {
    swiglu_backward(widen(grad[i]), widen(gate[i]), widen(up[i]), dgate, dup);
    grad_gate[i] = narrow<S>(dgate);
    grad_up[i] = narrow<S>(dup);
  }
}

}  // namespace
}  // namespace megatron_lite

using namespace megatron_lite;

extern "C" int megatron_lite_swiglu_forward(int dtype, const void* gate, const void* up, void* out, int64_t n,
                                            void* stream) {
  if (n == 0) return 0;
  return with_dtype(dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    constexpr int N = kVector<S>;
    const auto *g = static_cast<const S*>(gate), *u = static_cast<const S*>(up);
    auto* o = static_cast<S*>(out);
    const auto grid = unsigned(blocks_for(n, kThreads * N));
    if (aligned(gate, 16) && aligned(up, 16) && aligned(out, 16)) {
      ML_LAUNCH((forward_kernel<S, N>), grid, kThreads, 0, stream, g, u, o, n);
    } else {
      ML_LAUNCH((forward_kernel<S, 1>), grid, kThreads, 0, stream, g, u, o, n);
    }
    return int(cudaGetLastError());
  });
}

extern "C" int megatron_lite_swiglu_backward(int dtype, const void* grad, const void* gate, const void* up,
                                             void* grad_gate, void* grad_up, int64_t n, void* stream) {
  if (n == 0) return 0;
  return with_dtype(dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    constexpr int N = kVector<S>;
    const auto *d = static_cast<const S*>(grad), *g = static_cast<const S*>(gate), *u = static_cast<const S*>(up);
    auto *dg = static_cast<S*>(grad_gate), *du = static_cast<S*>(grad_up);
    const auto grid = unsigned(blocks_for(n, kThreads * N));
    const void* all[] = {grad, gate, up, grad_gate, grad_up};
    bool vectors = true;
    for (const void* p : all) vectors = vectors && aligned(p, 16);
    if (vectors) {
      ML_LAUNCH((backward_kernel<S, N>), grid, kThreads, 0, stream, d, g, u, dg, du, n);
    } else {
      ML_LAUNCH((backward_kernel<S, 1>), grid, kThreads, 0, stream, d, g, u, dg, du, n);
    }
    return int(cudaGetLastError());
  });
}
