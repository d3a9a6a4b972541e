// AdamW on the CPU: one pass over weights, moments and gradient, in place.
//
// Eager PyTorch walks over memory a dozen times for this; here each of the four fp32 values is read once and three are
// written once, together with the copy in the model's dtype. `skip` is read where it lies: when it is true nothing is
// touched at all. The square root is the machine's, which IEEE defines; the rest is common/numbers.h.
#include <torch/csrc/stable/library.h>

#include "adamw.h"
#include "common/cpu.h"
#include "common/tensors.h"

namespace megatron_lite {
namespace {

struct Same {};  // in place of the dtype of the model's copy, when the master is the copy

template <class C, class G, class P>
struct Step {
  static ML_FN void run(P* __restrict out, C* __restrict w, const G* __restrict grad, C* __restrict m, C* __restrict v,
                        AdamwCoefficients<C> c, C factor, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const C g = widen(grad[i]) * factor;
      adamw_element(g, w[i], m[i], v[i], c);
      if constexpr (!std::is_same_v<P, Same>) out[i] = narrow<P>(w[i]);
    }
  }
};

double scalar(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Double) return *pointer<double>(t, 1, "factor");
  return *pointer<float>(t, 1, "factor");
}

bool truth(const Tensor& t) {
  STD_TORCH_CHECK(t.numel() == 1, "skip must have one element");
  const auto* bytes = static_cast<const unsigned char*>(t.data_ptr());
  for (size_t i = 0; i < t.element_size(); ++i) {
    if (bytes[i] != 0) return true;
  }
  return false;
}

template <class C>
void step_for(const Tensor& param_out, const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
              const Tensor& exp_avg_sq, const AdamwCoefficients<C>& c, C factor, int64_t isa) {
  const int64_t n = master.numel();
  C* w = pointer<C>(master, n, "master");
  C* m = pointer<C>(exp_avg, n, "exp_avg");
  C* v = pointer<C>(exp_avg_sq, n, "exp_avg_sq");
  const auto launch = [&](auto g, auto* out) {
    using P = std::remove_pointer_t<decltype(out)>;
    using G = std::remove_const_t<std::remove_pointer_t<decltype(g)>>;
    parallel(n, kGrain, [&](int64_t begin, int64_t end) {
      run_for_isa<Step<C, G, P>>(isa, out, w, g, m, v, c, factor, begin, end);
    });
  };
  with_dtype(grad, [&](auto type) {
    using G = typename decltype(type)::type;
    if constexpr (std::is_same_v<compute_t<G>, C>) {
      const G* g = pointer<G>(grad, n, "grad");
      if (param_out.data_ptr() == master.data_ptr()) return launch(g, static_cast<Same*>(nullptr));
      with_dtype(param_out, [&](auto out_type) {
        using P = typename decltype(out_type)::type;
        if constexpr (std::is_same_v<compute_t<P>, C>) return launch(g, pointer<P>(param_out, n, "param_out"));
        STD_TORCH_CHECK(false, "param_out and master: float64 goes with float64 only");
      });
    } else {
      STD_TORCH_CHECK(false, "grad and master: float64 goes with float64 only");
    }
  });
}

template <class C>
AdamwCoefficients<C> coefficients(double decay, double beta1, double one_minus_beta1, double beta2,
                                  double one_minus_beta2, double step_size, double inverse_root, double eps) {
  return {C(decay), C(beta1), C(one_minus_beta1), C(beta2), C(one_minus_beta2), C(step_size), C(inverse_root), C(eps)};
}

void adamw(Tensor param_out, Tensor master, const Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, double decay,
           double beta1, double one_minus_beta1, double beta2, double one_minus_beta2, double step_size,
           double inverse_root, double eps, double factor, std::optional<Tensor> factor_tensor,
           std::optional<Tensor> skip, int64_t isa) {
  if (skip.has_value() && truth(*skip)) return;
  if (factor_tensor.has_value()) factor = scalar(*factor_tensor);
  const bool doubles = master.scalar_type() == ScalarType::Double;
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    step_for<C>(param_out, master, grad, exp_avg, exp_avg_sq,
                coefficients<C>(decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps),
                C(factor), isa);
  };
  doubles ? run(double(0)) : run(float(0));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) { m.impl("adamw_", TORCH_BOX(&adamw)); }

}  // namespace megatron_lite
