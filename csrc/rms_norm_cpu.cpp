// RMS norm on the CPU, forward and backward: y = x * scale * weight, scale = 1 / sqrt(mean(x^2) + eps), per row.
//
// A row fits into the first-level cache, so it is read from memory once and walked over twice. Forward keeps one number
// per row, `scale`. With xhat = x * scale and d = grad * weight, the gradients are
//
//     grad_x      = scale * (d - xhat * mean(d * xhat))          (a row by itself)
//     grad_weight = sum over rows of grad * xhat                  (columns, over all rows)
//
// The column sums are taken in the same pass: rows are cut into blocks (their number is the caller's, so that it does not
// depend on the threads), each block sums into a row of `partial`, and the blocks are added up in order in fp64.
//
// Sums along a row run in kLanes lanes that are a property of the algorithm, not of the vector unit: lane l adds the elements l, l +
// kLanes, ... of a stretch of kStretch elements, lanes are added pairwise, stretches in fp64. Every instruction set
// therefore gives the same bits, and the error grows with the length of a stretch, not of the row.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "common/cpu.h"
#include "common/tensors.h"

namespace megatron_lite {
namespace {

constexpr int64_t kLanes = 32;
constexpr int64_t kStretch = 1024;

// The sum of term(i) for i in [0, n).
template <class C, class Term>
ML_FN double sum_of(int64_t n, const Term& term) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kStretch) {
    const int64_t length = n - begin < kStretch ? n - begin : kStretch;
    C lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) lane[l] = lane[l] + term(begin + i + l);
    }
    for (int64_t l = 0; i + l < length; ++l) lane[l] = lane[l] + term(begin + i + l);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
    }
    total += double(lane[0]);
  }
  return total;
}

template <class S, class W>
struct Forward {
  using C = compute_t<S>;
  static ML_FN void run(const S* __restrict x, const W* __restrict weight, S* __restrict y, C* __restrict scales,
                        double eps, int64_t hidden, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const S* __restrict xr = x + row * hidden;
      S* __restrict yr = y + row * hidden;
      const double squares = sum_of<C>(hidden, [xr](int64_t i) {
        const C v = widen(xr[i]);
        return v * v;
      });
      const C scale = C(1.0 / std::sqrt(squares / double(hidden) + eps));
      scales[row] = scale;
      for (int64_t i = 0; i < hidden; ++i) yr[i] = narrow<S>(widen(xr[i]) * scale * C(widen(weight[i])));
    }
  }
};

// One block of rows: grad_x, and the block's part of grad_weight.
template <class S, class W>
struct BackwardRows {
  using C = compute_t<S>;
  static ML_FN void run(const S* __restrict grad, const S* __restrict x, const W* __restrict weight,
                        const C* __restrict scales, S* __restrict grad_x, C* __restrict partial, int64_t hidden,
                        int64_t begin, int64_t end) {
    for (int64_t i = 0; i < hidden; ++i) partial[i] = 0;
    for (int64_t row = begin; row < end; ++row) {
      const S* __restrict gr = grad + row * hidden;
      const S* __restrict xr = x + row * hidden;
      S* __restrict dr = grad_x + row * hidden;
      const C scale = scales[row];
      const double products = sum_of<C>(hidden, [=](int64_t i) {
        return widen(gr[i]) * C(widen(weight[i])) * (widen(xr[i]) * scale);
      });
      const C mean = C(products / double(hidden));
      for (int64_t i = 0; i < hidden; ++i) {
        const C g = widen(gr[i]);
        const C xhat = widen(xr[i]) * scale;
        dr[i] = narrow<S>((g * C(widen(weight[i])) - xhat * mean) * scale);
        partial[i] = partial[i] + g * xhat;
      }
    }
  }
};

// Columns [begin, end) of the sum over blocks.
template <class C, class W>
struct SumBlocks {
  static ML_FN void run(const C* __restrict partial, W* __restrict grad_weight, int64_t blocks, int64_t hidden,
                        int64_t begin, int64_t end) {
    constexpr int64_t kColumns = 64;
    for (int64_t first = begin; first < end; first += kColumns) {
      const int64_t columns = end - first < kColumns ? end - first : kColumns;
      double total[kColumns] = {};
      for (int64_t b = 0; b < blocks; ++b) {
        const C* __restrict row = partial + b * hidden + first;
        for (int64_t i = 0; i < columns; ++i) total[i] = total[i] + double(row[i]);
      }
      for (int64_t i = 0; i < columns; ++i) grad_weight[first + i] = narrow<W>(compute_t<W>(total[i]));
    }
  }
};

// f(Type<S>, Type<W>) for a weight of x's dtype or of the dtype that x is computed in.
template <class F>
void with_dtypes(const Tensor& x, const Tensor& weight, const F& f) {
  with_dtype(x, [&](auto type) {
    using S = typename decltype(type)::type;
    if (weight.scalar_type() == x.scalar_type()) return f(Type<S>{}, Type<S>{});
    f(Type<S>{}, Type<compute_t<S>>{});
  });
}

void forward(const Tensor x, const Tensor weight, double eps, Tensor y, Tensor scale, int64_t isa) {
  const int64_t hidden = weight.numel(), rows = scale.numel();
  with_dtypes(x, weight, [&](auto s, auto w) {
    using S = typename decltype(s)::type;
    using W = typename decltype(w)::type;
    const S* px = pointer<S>(x, rows * hidden, "x");
    const W* pw = pointer<W>(weight, hidden, "weight");
    S* py = pointer<S>(y, rows * hidden, "y");
    auto* ps = pointer<compute_t<S>>(scale, rows, "scale");
    parallel(rows, kGrain / std::max<int64_t>(hidden, 1), [&](int64_t begin, int64_t end) {
      run_for_isa<Forward<S, W>>(isa, px, pw, py, ps, eps, hidden, begin, end);
    });
  });
}

void backward(const Tensor grad, const Tensor x, const Tensor weight, const Tensor scale, Tensor grad_x,
              Tensor grad_weight, Tensor partial, int64_t isa) {
  const int64_t hidden = weight.numel(), rows = scale.numel(), blocks = partial.size(0);
  const int64_t rows_per_block = blocks > 0 ? (rows + blocks - 1) / blocks : 0;
  with_dtypes(x, weight, [&](auto s, auto w) {
    using S = typename decltype(s)::type;
    using W = typename decltype(w)::type;
    using C = compute_t<S>;
    const S* pg = pointer<S>(grad, rows * hidden, "grad");
    const S* px = pointer<S>(x, rows * hidden, "x");
    const W* pw = pointer<W>(weight, hidden, "weight");
    const C* ps = pointer<C>(scale, rows, "scale");
    S* pd = pointer<S>(grad_x, rows * hidden, "grad_x");
    W* pdw = pointer<W>(grad_weight, hidden, "grad_weight");
    C* pp = pointer<C>(partial, blocks * hidden, "partial");
    parallel(blocks, kGrain / std::max<int64_t>(hidden * rows_per_block, 1), [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        const int64_t begin = std::min(rows, b * rows_per_block), end = std::min(rows, begin + rows_per_block);
        run_for_isa<BackwardRows<S, W>>(isa, pg, px, pw, ps, pd, pp + b * hidden, hidden, begin, end);
      }
    });
    parallel(hidden, kGrain / std::max<int64_t>(blocks, 1), [&](int64_t begin, int64_t end) {
      run_for_isa<SumBlocks<C, W>>(isa, static_cast<const C*>(pp), pdw, blocks, hidden, begin, end);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("rms_norm_forward", TORCH_BOX(&forward));
  m.impl("rms_norm_backward", TORCH_BOX(&backward));
}

}  // namespace megatron_lite
