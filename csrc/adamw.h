// AdamW on one element. ops/adamw.py has the formula; the operations and their order here are those of its reference,
// each rounded by itself.
#pragma once

#include "common/numbers.h"

namespace megatron_lite {

template <class C>
struct AdamwCoefficients {
  C decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps;
};

template <class C>
ML_FN void adamw_element(C g, C& w, C& m, C& v, const AdamwCoefficients<C>& c) {
  m = m * c.beta1 + g * c.one_minus_beta1;
  v = v * c.beta2 + g * g * c.one_minus_beta2;
  const C denominator = square_root(v) * c.inverse_root + c.eps;
  w = w * c.decay - m / denominator * c.step_size;
}

}  // namespace megatron_lite
