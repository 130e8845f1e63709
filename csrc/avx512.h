// Shared by the translation units that are compiled for AVX-512 (F, BW, DQ, VL), with or without
// BF16, and by no other.
//
// All code here and in the headers that include this is in an unnamed namespace, and no C++ library
// header is included: nothing compiled with these flags can be picked by the linker for the other
// units.
#pragma once

#include "kernels.h"

#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 16")

namespace dualpace {
namespace avx512 {

void attention_fp32(const AttentionArgs* args);
void attention_bf16(const AttentionArgs* args);

}  // namespace avx512

namespace {

inline __mmask16 first16(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline __mmask32 first32(int n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1); }

// The even and the odd ones of 32 bfloat16, widened.
inline __m512 widen_even(__m512i words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline __m512 widen_odd(__m512i words) {
  const __m512i high_halves = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_castsi512_ps(_mm512_and_si512(words, high_halves));
}

// 32 numbers in order <-> the even and the odd ones of them.
inline void deinterleave(__m512* a, __m512* b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512 first = _mm512_permutex2var_ps(*a, even, *b);
  *b = _mm512_permutex2var_ps(*a, odd, *b);
  *a = first;
}
inline void interleave(__m512* a, __m512* b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = _mm512_permutex2var_ps(*a, low, *b);
  *b = _mm512_permutex2var_ps(*a, high, *b);
  *a = first;
}

// e^x within 2 ulp: 2^n * e^r with |r| <= ln(2)/2 and the Taylor polynomial of degree 7 for e^r.
// -inf gives 0 and a NaN stays one (operand order of min and max).
inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.72284f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln(2) in two parts, the first short enough for n * part to be exact.
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

}  // namespace
}  // namespace dualpace
