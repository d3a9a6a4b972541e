// Philox 4x32-10 and the normal numbers made from it. megatron_lite/tensor/random.py is the definition; here are the same
// integer operations in 32 bits, and the same double operations in the same order, none contracted, so that the bits are
// the same.
//
// Source: Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once

#include "common/numbers.h"

namespace megatron_lite {

constexpr int kOrder = 13;  // of the polynomials; a row of the table has kOrder + 1 coefficients

ML_FN void philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, uint32_t& w0,
                      uint32_t& w1, uint32_t& w2, uint32_t& w3) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(c0) * 0xD2511F53u;
    const uint64_t product1 = uint64_t(c2) * 0xCD9E8D57u;
    const uint32_t next0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    const uint32_t next2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c0 = next0;
    c1 = uint32_t(product1);
    c2 = next2;
    c3 = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  w0 = c0;
  w1 = c1;
  w2 = c2;
  w3 = c3;
}

// The standard normal number of a word.
ML_FN double normal_of(uint32_t word, const double* table) {
  const double n = double(int32_t(word & 0x7fffffffu)) * 2.0 + 1.0;  // exact, as are the two marked below
  const uint64_t bits = bit_cast<uint64_t>(n);
  const int32_t octave = int32_t(bits >> 52) - 1023;
  const double s = bit_cast<double>((bits & 0xfffffffffffffu) | 0x3ff0000000000000u) - 1.5;  // exact
  const double* row = table + octave * (kOrder + 1);
  double z = row[kOrder];
  for (int k = kOrder - 1; k >= 0; --k) z = z * s + row[k];
  z = z * ((4294967296.0 - n) * 0x1p-33);  // the factor is exact
  return (word >> 31) != 0 ? -z : z;
}

}  // namespace megatron_lite
