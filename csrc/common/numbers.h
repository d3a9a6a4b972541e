// Numbers: the four dtypes, how they are widened and rounded, and an exponential. For the host and the device alike.
//
// The one idea is that every function here is a fixed sequence of IEEE operations (+ - * / and integer ones), compiled
// without contraction into fused multiply-adds and without fast-math. Then a result does not depend on where an element
// lies in a buffer, on the width of the vector unit, on whether it fell into the tail of a loop, on the thread count, or
// on the machine: the scalar, AVX2, AVX-512 and CUDA forms of an element-wise kernel agree in every bit.
//
// bfloat16 and float16 are held as their bits; arithmetic is done in float and rounded once, to nearest, ties to even.
// Every branch is a select, so that compilers turn loops over these functions into vector code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ML_FN __host__ __device__ __forceinline__
#else
#define ML_FN inline __attribute__((always_inline))
#endif

namespace megatron_lite {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The type in which an op on S computes.
template <class S>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class S>
using compute_t = typename Compute<S>::type;

template <class To, class From>
ML_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

ML_FN float widen(float x) { return x; }
ML_FN double widen(double x) { return x; }
ML_FN float widen(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

ML_FN float widen(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  const uint32_t normal = (rest << 13) + (112u << 23);             // the exponent's bias goes from 15 to 127
  const uint32_t special = (rest << 13) | 0x7f800000u;             // infinities and NaNs
  const uint32_t small = bit_cast<uint32_t>(float(int32_t(rest)) * 0x1p-24f);  // subnormals: an integer times 2^-24
  uint32_t bits = rest >= 0x7c00u ? special : normal;
  bits = rest < 0x0400u ? small : bits;
  return bit_cast<float>(sign | bits);
}

template <class S>
ML_FN S narrow(compute_t<S> x);

template <>
ML_FN float narrow<float>(float x) {
  return x;
}
template <>
ML_FN double narrow<double>(double x) {
  return x;
}

template <>
ML_FN bf16 narrow<bf16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{uint16_t(nan ? 0x7fc0u : rounded)};
}

template <>
ML_FN fp16 narrow<fp16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  const uint32_t normal = (rest - (112u << 23) + 0x0fffu + ((rest >> 13) & 1u)) >> 13;  // may round up to infinity
  // Subnormal results: a unit in the last place of 0.5 is 2^-24, the spacing of fp16's subnormals.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  uint32_t half = rest < 0x38800000u ? small : normal;
  half = rest >= 0x47800000u ? 0x7c00u : half;  // 65536 and more; 65520 and more round up by themselves
  half = rest > 0x7f800000u ? 0x7e00u : half;
  return fp16{uint16_t(sign | half)};
}

ML_FN float square_root(float x) { return sqrtf(x); }
ML_FN double square_root(double x) { return sqrt(x); }

// e^x, within about one unit in the last place. x = n ln 2 + r with |r| <= ln(2)/2; a Taylor polynomial in r; times 2^n,
// put together from bits. Adding 1.5 * 2^23 (2^52) rounds to an integer, which then stands in the low bits of the sum.
// Above the largest finite result: infinity. Below -87 (-708): about 1e-38 (1e-308), which is 0 when it is added to 1.
ML_FN float exponential(float x) {
  float c = x > 88.7228394f ? 88.7228394f : x;  // NaN passes both comparisons
  c = c < -86.5f ? -86.5f : c;
  const float shifted = c * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = c - n * 0.693359375f;  // ln 2 in two parts, the first of few bits so that the product is exact
  r = r - n * -2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  const float scale = bit_cast<float>((bit_cast<uint32_t>(shifted) + 126u) << 23);  // 2^(n-1): n can be 128
  const float e = p * scale * 2.0f;
  return x > 88.7228394f ? bit_cast<float>(0x7f800000u) : e;
}

ML_FN double exponential(double x) {
  double c = x > 709.782712893384 ? 709.782712893384 : x;
  c = c < -707.0 ? -707.0 : c;
  const double shifted = c * 1.4426950408889634 + 6755399441055744.0;
  const double n = shifted - 6755399441055744.0;
  double r = c - n * 0x1.62e42fefa0000p-1;
  r = r - n * 0x1.cf79abc9e3b3ap-40;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r;
  p = p + 1.0;
  const double scale = bit_cast<double>((bit_cast<uint64_t>(shifted) + 1022u) << 52);
  const double e = p * scale * 2.0;
  return x > 709.782712893384 ? bit_cast<double>(uint64_t(0x7ff0000000000000u)) : e;
}

}  // namespace megatron_lite
