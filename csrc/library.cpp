// The signatures of every compiled op, in one place; each is implemented in the file of its name, per device.
//
// All of them write into tensors that the caller made, so that one allocation policy (PyTorch's, in Python) holds on every
// device and the signatures need nothing but tensors and numbers from the stable ABI. `isa` is read by the CPU kernels
// only: -1 for the best instruction set, 0 to force the plain one.
#include <torch/csrc/stable/library.h>

#include "common/cpu.h"

// The best instruction set that this CPU has: 0 plain, 1 AVX2, 2 AVX-512.
static int64_t cpu_isa() { return megatron_lite::best_isa(); }

STABLE_TORCH_LIBRARY(megatron_lite, m) {
  m.def("cpu_isa() -> int");
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.def("swiglu_forward(Tensor gate, Tensor up, Tensor(a!) out, int isa) -> ()");
  m.def(
      "swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor(a!) grad_gate, Tensor(b!) grad_up, int isa) -> ()");
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps, Tensor(a!) y, Tensor(b!) scale, int isa) -> ()");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor(a!) grad_x, "
      "Tensor(b!) grad_weight, Tensor(c!) partial, int isa) -> ()");
  m.def(
      "adamw_(Tensor(a!) param_out, Tensor(b!) master, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
      "float decay, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float step_size, "
      "float inverse_root, float eps, float factor, Tensor? factor_tensor, Tensor? skip, int isa) -> ()");
  m.def("philox_normal(Tensor(a!) out, Tensor table, Tensor start, int key0, int key1, float std, int isa=-1) -> ()");
  m.def(
      "philox_keep(Tensor(a!) out, Tensor start, Tensor above1, Tensor above2, Tensor above3, int key0, int key1, "
      "int threshold, int isa=-1) -> ()");
}
