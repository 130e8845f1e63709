// Norm, rotation, conversion and SwiGLU with 512-bit vectors; `Rounding::to_bf16` turns 16 floats
// into bfloat16. Included by translation units that are compiled for AVX-512; see avx512.h.
#pragma once

#include "avx512.h"

#include <math.h>
#include <string.h>

namespace dualpace {
namespace {

// Of the 16 elements from `i` on, those before `n`.
inline __mmask16 rest16(int i, int n) {
  return n - i >= 16 ? static_cast<__mmask16>(0xffff) : first16(n - i);
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  __m512 squares[4];
  UNROLL for (int j = 0; j < 4; ++j) squares[j] = _mm512_setzero_ps();
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    UNROLL for (int j = 0; j < 4; ++j) {
      const __m512 a = _mm512_loadu_ps(x + i + 16 * j);
      squares[j] = _mm512_fmadd_ps(a, a, squares[j]);
    }
  }
  for (; i < n; i += 16) {
    const __m512 a = _mm512_maskz_loadu_ps(rest16(i, n), x + i);
    squares[0] = _mm512_fmadd_ps(a, a, squares[0]);
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(squares[0], squares[1]),
                                                       _mm512_add_ps(squares[2], squares[3])));
  const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(sum / static_cast<float>(n) + eps));
  for (i = 0; i < n; i += 16) {
    const __mmask16 mask = rest16(i, n);
    const __m512 a = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
    _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(a, _mm512_maskz_loadu_ps(mask, weight + i)));
  }
}

void rope(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i += 16) {
    const __mmask16 mask = rest16(i, half);
    const __m512 a = _mm512_maskz_loadu_ps(mask, x + i);
    const __m512 b = _mm512_maskz_loadu_ps(mask, x + half + i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cosine + i);
    const __m512 s = _mm512_maskz_loadu_ps(mask, sine + i);
    _mm512_mask_storeu_ps(x + i, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    _mm512_mask_storeu_ps(x + half + i, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

void store_fp32(const float* x, int n, void* dst) {
  memcpy(dst, x, static_cast<size_t>(n) * sizeof(float));
}

template <class Rounding>
void store_bf16(const float* x, int n, void* dst) {
  uint16_t* y = static_cast<uint16_t*>(dst);
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = rest16(i, n);
    _mm256_mask_storeu_epi16(y + i, mask, Rounding::to_bf16(_mm512_maskz_loadu_ps(mask, x + i)));
  }
}

// x[32]: 16 gate values, then 16 up values.
inline __m512 silu_times_up(const float* x) {
  const __m512 gate = _mm512_loadu_ps(x);
  const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
  const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
  return _mm512_mul_ps(silu, _mm512_loadu_ps(x + kPanel));
}

void swiglu_fp32(const float* x, size_t ldx, int m, void* out, size_t ldo) {
  float* y = static_cast<float*>(out);
  for (int row = 0; row < m; ++row, x += ldx, y += ldo) _mm512_storeu_ps(y, silu_times_up(x));
}

template <class Rounding>
void swiglu_bf16(const float* x, size_t ldx, int m, void* out, size_t ldo) {
  uint16_t* y = static_cast<uint16_t*>(out);
  for (int row = 0; row < m; ++row, x += ldx, y += ldo) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), Rounding::to_bf16(silu_times_up(x)));
  }
}

}  // namespace
}  // namespace dualpace
