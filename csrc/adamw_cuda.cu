// AdamW on CUDA: one pass over weights, moments and gradient, in place.
//
// Bound by memory: an element with fp32 state and a bf16 weight moves 30 bytes. `factor` (unscaling times clipping) and
// `skip` are read where they lie, so the host does not wait for the gradient norm; with skip true every thread returns
// before it touches anything. The arithmetic is that of adamw.h, without fused multiply-adds.
#include "adamw.h"
#include "common/cuda.h"

namespace megatron_lite {
namespace {

struct Same {};  // in place of the dtype of the model's copy, when the master is the copy

__device__ inline bool skipped(const unsigned char* skip, int bytes) {
  if (skip == nullptr) return false;
  for (int i = 0; i < bytes; ++i) {
    if (skip[i] != 0) return true;
  }
  return false;
}

template <class C>
struct Arguments {
  C* master;
  C* exp_avg;
  C* exp_avg_sq;
  AdamwCoefficients<C> c;
  C factor;
  const float* factor32;   // at most one of these two is not null
  const double* factor64;
  const unsigned char* skip;
  int skip_bytes;
  int64_t n;
};

template <class C, class G, class P, int N>
__global__ void __launch_bounds__(kThreads) step_kernel(P* out, const G* grad, Arguments<C> a) {
  if (skipped(a.skip, a.skip_bytes)) return;
  C factor = a.factor;
  if (a.factor32 != nullptr) factor = C(*a.factor32);
  if (a.factor64 != nullptr) factor = C(*a.factor64);
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
  const int64_t packs = a.n / N;
  for (int64_t p = thread; p < packs; p += threads) {
    const int64_t i = p * N;
    const Pack<G, N> g = load<N>(grad + i);
    Pack<C, N> w = load<N>(a.master + i), m = load<N>(a.exp_avg + i), v = load<N>(a.exp_avg_sq + i);
    for (int k = 0; k < N; ++k) adamw_element(C(widen(g.v[k]) * factor), w.v[k], m.v[k], v.v[k], a.c);
    store<N>(a.master + i, w);
    store<N>(a.exp_avg + i, m);
    store<N>(a.exp_avg_sq + i, v);
    if constexpr (!std::is_same_v<P, Same>) {
      Pack<P, N> o;
      for (int k = 0; k < N; ++k) o.v[k] = narrow<P>(w.v[k]);
      store<N>(out + i, o);
    }
  }
  for (int64_t i = packs * N + thread; i < a.n; i += threads) {
    adamw_element(C(widen(grad[i]) * factor), a.master[i], a.exp_avg[i], a.exp_avg_sq[i], a.c);
    if constexpr (!std::is_same_v<P, Same>) out[i] = narrow<P>(a.master[i]);
  }
}

template <class C, class G, class P>
int launch(P* out, const G* grad, const Arguments<C>& a, void* stream) {
  constexpr int N = 16 / int(sizeof(C));  // 16 bytes of state; fewer of a half-precision gradient or weight
  const auto grid = unsigned(blocks_for(a.n, kThreads * N));
  const bool vectors = aligned(a.master, 16) && aligned(a.exp_avg, 16) && aligned(a.exp_avg_sq, 16) &&
                       aligned(grad, N * sizeof(G)) && (out == nullptr || aligned(out, N * sizeof(P)));
  if (vectors) {
    ML_LAUNCH((step_kernel<C, G, P, N>), grid, kThreads, 0, stream, out, grad, a);
  } else {
    ML_LAUNCH((step_kernel<C, G, P, 1>), grid, kThreads, 0, stream, out, grad, a);
  }
  return int(cudaGetLastError());
}

}  // namespace
}  // namespace megatron_lite

using namespace megatron_lite;

extern "C" int megatron_lite_adamw(int dtype, int grad_dtype, int out_dtype, void* param_out, void* master,
                                   const void* grad, void* exp_avg, void* exp_avg_sq, MegatronLiteAdamw c,
                                   int factor_dtype, const void* factor, const void* skip, int skip_bytes, int64_t n,
                                   void* stream) {
  if (n == 0) return 0;
  return with_dtype(grad_dtype, [&](auto grad_type) {
    using G = typename decltype(grad_type)::type;
    using C = compute_t<G>;
    if ((dtype == kFloat64) != (sizeof(C) == 8)) return -1;  // float64 goes with float64 only
    Arguments<C> a{static_cast<C*>(master), static_cast<C*>(exp_avg), static_cast<C*>(exp_avg_sq),
                   {C(c.decay), C(c.beta1), C(c.one_minus_beta1), C(c.beta2), C(c.one_minus_beta2), C(c.step_size),
                    C(c.inverse_root), C(c.eps)},
                   C(c.factor),
                   factor_dtype == kFloat64 ? nullptr : static_cast<const float*>(factor),
                   factor_dtype == kFloat64 ? static_cast<const double*>(factor) : nullptr,
                   static_cast<const unsigned char*>(skip), skip_bytes, n};
    const G* g = static_cast<const G*>(grad);
    if (param_out == nullptr) return launch<C, G, Same>(nullptr, g, a, stream);
    return with_dtype(out_dtype, [&](auto out_type) {
      using P = typename decltype(out_type)::type;
      if constexpr (sizeof(compute_t<P>) == sizeof(C)) {
        return launch<C, G, P>(static_cast<P*>(param_out), g, a, stream);
      } else {
        return -1;
      }
    });
  });
}
