// Running a loop with the best instruction set of this CPU, on all threads of PyTorch's pool.
//
// A kernel is a struct with an always-inlined static function `run`. It is compiled once per instruction set, by
// inlining it into functions with a `target` attribute, and one of them is chosen when it is called: the binary is built
// for the plain architecture and runs on any CPU of it. No file is compiled with -march, so no inline function of the
// standard library can carry instructions into places where the CPU lacks them.
//
// `isa` is an argument everywhere: -1 for the best, or one of the constants below, for tests.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "numbers.h"

namespace megatron_lite {

enum Isa : int64_t { kBest = -1, kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

inline int64_t best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kBaseline;
}

#if defined(__x86_64__)
template <class Kernel, class... Args>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void run_avx512(Args... args) {
  Kernel::run(args...);
}
template <class Kernel, class... Args>
__attribute__((target("avx2"))) void run_avx2(Args... args) {
  Kernel::run(args...);
}
#endif

// Kernel::run(args...) in the form for `isa`; one that this CPU lacks falls to the best it has.
template <class Kernel, class... Args>
void run_for_isa(int64_t isa, Args... args) {
#if defined(__x86_64__)
  static const int64_t best = best_isa();
  const int64_t use = isa == kBest ? best : std::min(isa, best);
  if (use == kAvx512) return run_avx512<Kernel>(args...);
  if (use == kAvx2) return run_avx2<Kernel>(args...);
#endif
  Kernel::run(args...);
}

// Elements that a thread should have to itself before a second thread is worth its start.
constexpr int64_t kGrain = 16384;

template <class F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n > 0) torch::stable::parallel_for(0, n, std::max<int64_t>(grain, 1), f);
}

}  // namespace megatron_lite
