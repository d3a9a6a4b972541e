// From tensors of PyTorch's stable ABI to pointers, and from a run-time dtype to a type.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <type_traits>

#include "numbers.h"

namespace megatron_lite {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class S>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr ScalarType value = ScalarType::Float;
};
template <>
struct DtypeOf<double> {
  static constexpr ScalarType value = ScalarType::Double;
};
template <>
struct DtypeOf<bf16> {
  static constexpr ScalarType value = ScalarType::BFloat16;
};
template <>
struct DtypeOf<fp16> {
  static constexpr ScalarType value = ScalarType::Half;
};
template <>
struct DtypeOf<int64_t> {
  static constexpr ScalarType value = ScalarType::Long;
};
template <>
struct DtypeOf<bool> {
  static constexpr ScalarType value = ScalarType::Bool;
};

// The caller in Python chooses by the same conditions; these checks keep a wrong call from reading wild memory.
template <class S>
S* pointer(const Tensor& t, int64_t numel, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == DtypeOf<S>::value, name, " has an unexpected dtype");
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(t.numel() == numel, name, " has ", t.numel(), " elements, expected ", numel);
  return static_cast<S*>(t.data_ptr());
}

template <class S>
struct Type {
  using type = S;
};

// f(Type<S>{}) for the dtype of t.
template <class F>
void with_dtype(const Tensor& t, const F& f) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return f(Type<float>{});
    case ScalarType::Double:
      return f(Type<double>{});
    case ScalarType::BFloat16:
      return f(Type<bf16>{});
    case ScalarType::Half:
      return f(Type<fp16>{});
    default:
      STD_TORCH_CHECK(false, "dtype must be float32, float64, bfloat16 or float16");
  }
}

}  // namespace megatron_lite
