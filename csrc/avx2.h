// Shared by the translation units that are compiled for AVX2 + FMA, and by no other.
//
// All code here is in an unnamed namespace, and no C++ library header is included: nothing compiled
// with AVX2 flags can be picked by the linker for the other units.
#pragma once

#include "kernels.h"

#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 16")

namespace dualpace {
namespace avx2 {

void attention_fp32(const AttentionArgs* args);
void attention_bf16(const AttentionArgs* args);

}  // namespace avx2

namespace {

inline float sum8(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline float max8(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// The four sums of four vectors.
inline __m128 sum8x4(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

// e^x within 2 ulp: 2^n * e^r with |r| <= ln(2)/2 and the Taylor polynomial of degree 7 for e^r.
// Below the smallest normal number it is 0; a NaN stays one (operand order of min and max).
inline __m256 exp8(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.33654f);
  const __m256 zero_out = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
  x = _mm256_max_ps(lowest, _mm256_min_ps(_mm256_set1_ps(88.376f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln(2) in two parts, the first short enough for n * part to be exact.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(zero_out, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

inline float exp1(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

inline __m256i high_halves() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }

}  // namespace
}  // namespace dualpace
