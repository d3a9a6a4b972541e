// SwiGLU of one element: out = silu(gate) * up, silu(z) = z * s, s = 1 / (1 + e^-z).
//
// The derivative of silu is s * (1 + z * (1 - s)). Nothing but gate and up is kept for backward: s is computed again,
// which costs an exponential and saves two tensors of the size of the largest activation of a block.
#pragma once

#include "common/numbers.h"

namespace megatron_lite {

template <class C>
ML_FN C sigmoid(C z) {
  return C(1) / (C(1) + exponential(-z));
}

template <class C>
ML_FN C swiglu_forward(C gate, C up) {
  return gate * sigmoid(gate) * up;
}

template <class C>
ML_FN void swiglu_backward(C grad, C gate, C up, C& grad_gate, C& grad_up) {
  const C s = sigmoid(gate);
  grad_gate = grad * up * (s * (C(1) + gate * (C(1) - s)));
  grad_up = grad * (gate * s);
}

}  // namespace megatron_lite
