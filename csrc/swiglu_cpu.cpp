// SwiGLU on the CPU: one pass over memory, every element by itself.
//
// Forward reads gate and up and writes one tensor; eager PyTorch reads or writes seven (three of them in fp32 when the
// model is bf16). The loops are plain: the compiler vectorises them for each instruction set (see common/cpu.h), and the
// elements that are left over at the end of a vector loop go through the same operations one by one.
#include <torch/csrc/stable/library.h>

#include "common/cpu.h"
#include "common/tensors.h"
#include "swiglu.h"

namespace megatron_lite {
namespace {

template <class S>
struct Forward {
  static ML_FN void run(const S* __restrict gate, const S* __restrict up, S* __restrict out, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out[i] = narrow<S>(swiglu_forward(widen(gate[i]), widen(up[i])));
    }
  }
};

template <class S>
struct Backward {
  static ML_FN void run(const S* __restrict grad, const S* __restrict gate, const S* __restrict up,
                        S* __restrict grad_gate, S* __restrict grad_up, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      compute_t<S> dgate, dup;
      swiglu_backward(widen(grad[i]), widen(gate[i]), widen(up[i]), dgate, dup);
      grad_gate[i] = narrow<S>(dgate);
      grad_up[i] = narrow<S>(dup);
    }
  }
};

void forward(const Tensor gate, const Tensor up, Tensor out, int64_t isa) {
  const int64_t n = gate.numel();
  with_dtype(gate, [&](auto type) {
    using S = typename decltype(type)::type;
    const S* g = pointer<S>(gate, n, "gate");
    const S* u = pointer<S>(up, n, "up");
    S* o = pointer<S>(out, n, "out");
    parallel(n, kGrain, [&](int64_t begin, int64_t end) { run_for_isa<Forward<S>>(isa, g, u, o, begin, end); });
  });
}

void backward(const Tensor grad, const Tensor gate, const Tensor up, Tensor grad_gate, Tensor grad_up, int64_t isa) {
  const int64_t n = gate.numel();
  with_dtype(gate, [&](auto type) {
    using S = typename decltype(type)::type;
    const S* d = pointer<S>(grad, n, "grad");
    const S* g = pointer<S>(gate, n, "gate");
    const S* u = pointer<S>(up, n, "up");
    S* dg = pointer<S>(grad_gate, n, "grad_gate");
    S* du = pointer<S>(grad_up, n, "grad_up");
    parallel(n, kGrain,
             [&](int64_t begin, int64_t end) { run_for_isa<Backward<S>>(isa, d, g, u, dg, du, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("swiglu_forward", TORCH_BOX(&forward));
  m.impl("swiglu_backward", TORCH_BOX(&backward));
}

}  // namespace megatron_lite
