// The CUDA ops as PyTorch sees them: checks, the current device and stream, and a call of the .cu file's function.
//
// This is the only CUDA file that includes torch, and it includes no header of CUDA: the stream is a pointer here.
#define USE_CUDA  // declares the stream functions of the stable ABI
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "common/launch.h"
#include "common/tensors.h"

namespace megatron_lite {
namespace {

int code(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::Double:
      return kFloat64;
    case ScalarType::BFloat16:
      return kBfloat16;
    case ScalarType::Half:
      return kFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float64, bfloat16 or float16");
  }
}

int compute_code(int dtype) { return dtype == kFloat64 ? kFloat64 : kFloat32; }

void* checked(const Tensor& t, int64_t numel, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index(), name, " is on another device");
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(t.numel() == numel, name, " has ", t.numel(), " elements, expected ", numel);
  return t.data_ptr();
}

// As above, for a tensor of a floating dtype that must be `dtype`.
void* checked(const Tensor& t, int64_t numel, const Tensor& like, const char* name, int dtype) {
  STD_TORCH_CHECK(code(t, name) == dtype, name, " has an unexpected dtype");
  return checked(t, numel, like, name);
}

// Makes the device of a tensor current and runs launch(stream).
template <class F>
void on_device_of(const Tensor& t, const char* op, const F& launch) {
  const auto device = t.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const int error = launch(stream);
  STD_TORCH_CHECK(error == 0, op, ": the launch failed with CUDA error ", error);
}

void swiglu_forward(const Tensor gate, const Tensor up, Tensor out, int64_t) {
  const int64_t n = gate.numel();
  const int dtype = code(gate, "gate");
  const void* g = checked(gate, n, gate, "gate");
  const void* u = checked(up, n, gate, "up", dtype);
  void* o = checked(out, n, gate, "out", dtype);
  on_device_of(gate, "swiglu_forward",
               [&](void* stream) { return megatron_lite_swiglu_forward(dtype, g, u, o, n, stream); });
}

void swiglu_backward(const Tensor grad, const Tensor gate, const Tensor up, Tensor grad_gate, Tensor grad_up, int64_t) {
  const int64_t n = gate.numel();
  const int dtype = code(gate, "gate");
  const void* d = checked(grad, n, gate, "grad", dtype);
  const void* g = checked(gate, n, gate, "gate");
  const void* u = checked(up, n, gate, "up", dtype);
  void* dg = checked(grad_gate, n, gate, "grad_gate", dtype);
  void* du = checked(grad_up, n, gate, "grad_up", dtype);
  on_device_of(gate, "swiglu_backward",
               [&](void* stream) { return megatron_lite_swiglu_backward(dtype, d, g, u, dg, du, n, stream); });
}

int weight_code(const Tensor& weight, int dtype) {
  const int weight_dtype = code(weight, "weight");
  STD_TORCH_CHECK(weight_dtype == dtype || weight_dtype == compute_code(dtype), "weight has an unexpected dtype");
  return weight_dtype;
}

void rms_norm_forward(const Tensor x, const Tensor weight, double eps, Tensor y, Tensor scale, int64_t) {
  const int64_t hidden = weight.numel(), rows = scale.numel();
  const int dtype = code(x, "x"), weight_dtype = weight_code(weight, dtype);
  const void* px = checked(x, rows * hidden, x, "x");
  const void* pw = checked(weight, hidden, x, "weight");
  void* py = checked(y, rows * hidden, x, "y", dtype);
  void* ps = checked(scale, rows, x, "scale", compute_code(dtype));
  on_device_of(x, "rms_norm_forward", [&](void* stream) {
    return megatron_lite_rms_norm_forward(dtype, weight_dtype, px, pw, eps, py, ps, rows, hidden, stream);
  });
}

void rms_norm_backward(const Tensor grad, const Tensor x, const Tensor weight, const Tensor scale, Tensor grad_x,
                       Tensor grad_weight, Tensor partial, int64_t) {
  const int64_t hidden = weight.numel(), rows = scale.numel(), blocks = partial.size(0);
  const int dtype = code(x, "x"), weight_dtype = weight_code(weight, dtype), compute = compute_code(dtype);
  const void* pg = checked(grad, rows * hidden, x, "grad", dtype);
  const void* px = checked(x, rows * hidden, x, "x");
  const void* pw = checked(weight, hidden, x, "weight");
  const void* ps = checked(scale, rows, x, "scale", compute);
  void* pd = checked(grad_x, rows * hidden, x, "grad_x", dtype);
  void* pdw = checked(grad_weight, hidden, x, "grad_weight", weight_dtype);
  void* pp = checked(partial, blocks * hidden, x, "partial", compute);
  on_device_of(x, "rms_norm_backward", [&](void* stream) {
    return megatron_lite_rms_norm_backward(dtype, weight_dtype, pg, px, pw, ps, pd, pdw, pp, blocks, rows, hidden,
                                           stream);
  });
}

void adamw(Tensor param_out, Tensor master, const Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, double decay,
           double beta1, double one_minus_beta1, double beta2, double one_minus_beta2, double step_size,
           double inverse_root, double eps, double factor, std::optional<Tensor> factor_tensor,
           std::optional<Tensor> skip, int64_t) {
  const int64_t n = master.numel();
  const int dtype = code(master, "master"), grad_dtype = code(grad, "grad"), out_dtype = code(param_out, "param_out");
  STD_TORCH_CHECK(dtype == kFloat32 || dtype == kFloat64, "master must be float32 or float64");
  void* w = checked(master, n, master, "master");
  const void* g = checked(grad, n, master, "grad");
  void* m = checked(exp_avg, n, master, "exp_avg", dtype);
  void* v = checked(exp_avg_sq, n, master, "exp_avg_sq", dtype);
  void* out = checked(param_out, n, master, "param_out");
  if (out == w) out = nullptr;
  const void *f = nullptr, *s = nullptr;
  int factor_dtype = kFloat32, skip_bytes = 0;
  if (factor_tensor.has_value()) {
    factor_dtype = code(*factor_tensor, "factor");
    STD_TORCH_CHECK(factor_dtype == kFloat32 || factor_dtype == kFloat64, "factor must be float32 or float64");
    f = checked(*factor_tensor, 1, master, "factor");
  }
  if (skip.has_value()) {
    s = checked(*skip, 1, master, "skip");
    skip_bytes = int(skip->element_size());
  }
  const MegatronLiteAdamw c{decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps, factor};
  on_device_of(master, "adamw_", [&](void* stream) {
    return megatron_lite_adamw(dtype, grad_dtype, out_dtype, out, w, g, m, v, c, factor_dtype, f, s, skip_bytes, n,
                               stream);
  });
}

const int64_t* addresses(const Tensor& t, int64_t rows, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long, name, " must be int64");
  return static_cast<const int64_t*>(checked(t, rows, like, name));
}

void philox_normal(Tensor out, const Tensor table, const Tensor start, int64_t key0, int64_t key1, double std, int64_t) {
  const int64_t rows = start.numel(), length = rows > 0 ? out.numel() / rows : 0;
  auto* values = static_cast<float*>(checked(out, rows * length, out, "out", kFloat32));
  const auto* coefficients = static_cast<const double*>(checked(table, 32 * 14, out, "table", kFloat64));
  const int64_t* first = addresses(start, rows, out, "start");
  on_device_of(out, "philox_normal", [&](void* stream) {
    return megatron_lite_philox_normal(values, coefficients, first, rows, length, uint32_t(key0), uint32_t(key1), std,
                                       stream);
  });
}

void philox_keep(Tensor out, const Tensor start, const Tensor above1, const Tensor above2, const Tensor above3,
                 int64_t key0, int64_t key1, int64_t threshold, int64_t) {
  const int64_t rows = start.numel(), length = rows > 0 ? out.numel() / rows : 0;
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Bool, "out must be bool");
  auto* decisions = static_cast<bool*>(checked(out, rows * length, out, "out"));
  const int64_t* first = addresses(start, rows, out, "start");
  const int64_t* parts[3] = {addresses(above1, rows, out, "above1"), addresses(above2, rows, out, "above2"),
                             addresses(above3, rows, out, "above3")};
  on_device_of(out, "philox_keep", [&](void* stream) {
    return megatron_lite_philox_keep(decisions, first, parts[0], parts[1], parts[2], rows, length, uint32_t(key0),
                                     uint32_t(key1), uint64_t(threshold), stream);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("swiglu_forward", TORCH_BOX(&swiglu_forward));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  m.impl("rms_norm_forward", TORCH_BOX(&rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("adamw_", TORCH_BOX(&adamw));
  m.impl("philox_normal", TORCH_BOX(&philox_normal));
  m.impl("philox_keep", TORCH_BOX(&philox_keep));
}

}  // namespace megatron_lite
