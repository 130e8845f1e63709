// Kernels for AVX2 + FMA: linear layers, element-wise operations, and the table of all.
#include "avx2.h"

#include <math.h>
#include <string.h>

namespace dualpace {
namespace {

// ---- linear -----------------------------------------------------------------------------------

// How a panel's weights become two vectors of 8 columns, for the even and the odd k of a pair.
struct Bf16Panel {
  typedef uint16_t Element;
  static inline void even(const uint16_t* w, __m256* lo, __m256* hi) {
    const __m256i* p = reinterpret_cast<const __m256i*>(w);
    *lo = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(p), 16));
    *hi = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(p + 1), 16));
  }
  static inline void odd(const uint16_t* w, __m256* lo, __m256* hi) {
    const __m256i* p = reinterpret_cast<const __m256i*>(w);
    *lo = _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(p), high_halves()));
    *hi = _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(p + 1), high_halves()));
  }
};

struct Fp32Panel {
  typedef float Element;
  static inline void even(const float* w, __m256* lo, __m256* hi) {
    *lo = _mm256_load_ps(w);
    *hi = _mm256_load_ps(w + 8);
  }
  static inline void odd(const float* w, __m256* lo, __m256* hi) {
    *lo = _mm256_load_ps(w + 16);
    *hi = _mm256_load_ps(w + 24);
  }
};

// R rows x 16 columns over all of k. Few rows keep even and odd k in accumulators of their own, for
// two fused multiply-adds a cycle need at least eight independent chains. `ahead` is how many
// elements further weights are prefetched: weights come from DRAM, and the hardware's prefetcher
// alone does not keep ahead of the arithmetic (it stops at page ends). Reaching past the last panel
// is harmless, a prefetch never faults.
template <class P, int R>
inline void linear_rows(const float* a, size_t lda, int k, const typename P::Element* w,
                        size_t ahead, const float* bias, float* c, size_t ldc, int accumulate) {
  constexpr int kChains = R <= 3 ? 2 : 1;
  __m256 acc[kChains][R][2];
  UNROLL for (int m = 0; m < R; ++m) {
    acc[0][m][0] = bias ? _mm256_loadu_ps(bias) : _mm256_setzero_ps();
    acc[0][m][1] = bias ? _mm256_loadu_ps(bias + 8) : _mm256_setzero_ps();
    if (kChains == 2) acc[kChains - 1][m][0] = acc[kChains - 1][m][1] = _mm256_setzero_ps();
  }
  for (int i = 0; i < k; i += 2, w += 2 * kPanel) {
    __m256 lo, hi;
    _mm_prefetch(reinterpret_cast<const char*>(w + ahead), _MM_HINT_T1);
    P::even(w, &lo, &hi);
    UNROLL for (int m = 0; m < R; ++m) {
      const __m256 x = _mm256_broadcast_ss(a + m * lda + i);
      acc[0][m][0] = _mm256_fmadd_ps(x, lo, acc[0][m][0]);
      acc[0][m][1] = _mm256_fmadd_ps(x, hi, acc[0][m][1]);
    }
    P::odd(w, &lo, &hi);
    UNROLL for (int m = 0; m < R; ++m) {
      const __m256 x = _mm256_broadcast_ss(a + m * lda + i + 1);
      acc[kChains - 1][m][0] = _mm256_fmadd_ps(x, lo, acc[kChains - 1][m][0]);
      acc[kChains - 1][m][1] = _mm256_fmadd_ps(x, hi, acc[kChains - 1][m][1]);
    }
  }
  UNROLL for (int m = 0; m < R; ++m) {
    UNROLL for (int j = 0; j < 2; ++j) {
      __m256 y = acc[0][m][j];
      if (kChains == 2) y = _mm256_add_ps(y, acc[kChains - 1][m][j]);
      float* out = c + m * ldc + 8 * j;
      if (accumulate) y = _mm256_add_ps(y, _mm256_loadu_ps(out));
      _mm256_storeu_ps(out, y);
    }
  }
}

template <class P>
void linear_panel(const LinearArgs* args, int index) {
  const size_t size =
      static_cast<size_t>((args->k + kAlignK - 1) / kAlignK * kAlignK) * kPanel;
  const typename P::Element* w =
      reinterpret_cast<const typename P::Element*>(args->panels) + index * size;
  const float* bias = args->bias ? args->bias + index * kPanel : nullptr;
  const float* a = static_cast<const float*>(args->a);
  float* c = args->c + index * kPanel;
  const size_t lda = args->lda, ldc = args->ldc;
  const int k = args->k, accumulate = args->accumulate;
  int m = args->m;
  // Blocks of at most five rows and of almost equal height: 8 rows are 4 + 4, not 5 + 3. Five rows
  // fill the 16 registers (10 sums, two raw and two widened vectors, mask, x); six spill and lose a
  // third of the speed.
  for (int blocks = (m + 4) / 5; blocks > 0; --blocks) {
    const int rows = (m + blocks - 1) / blocks;
    switch (rows) {
      case 1: linear_rows<P, 1>(a, lda, k, w, size, bias, c, ldc, accumulate); break;
      case 2: linear_rows<P, 2>(a, lda, k, w, size, bias, c, ldc, accumulate); break;
      case 3: linear_rows<P, 3>(a, lda, k, w, size, bias, c, ldc, accumulate); break;
      case 4: linear_rows<P, 4>(a, lda, k, w, size, bias, c, ldc, accumulate); break;
      default: linear_rows<P, 5>(a, lda, k, w, size, bias, c, ldc, accumulate); break;
    }
    a += rows * lda;
    c += rows * ldc;
    m -= rows;
  }
}

template <class P>
void linear(const LinearArgs* args) {
  for (int i = 0; i < args->num_panels; ++i) linear_panel<P>(args, i);
}

// ---- element-wise -----------------------------------------------------------------------------

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  __m256 acc0 = _mm256_setzero_ps(), acc1 = _mm256_setzero_ps();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
    acc0 = _mm256_fmadd_ps(a, a, acc0);
    acc1 = _mm256_fmadd_ps(b, b, acc1);
  }
  float sum = sum8(_mm256_add_ps(acc0, acc1));
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
  const __m256 scales = _mm256_set1_ps(scale);
  for (i = 0; i + 8 <= n; i += 8) {
    const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + i), scales);
    _mm256_storeu_ps(y + i, _mm256_mul_ps(a, _mm256_loadu_ps(weight + i)));
  }
  for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

void rope(float* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + 8 <= half; i += 8) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + half + i);
    const __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_loadu_ps(sine + i);
    _mm256_storeu_ps(x + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
    _mm256_storeu_ps(x + half + i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

// Eight floats to bfloat16, nearest even; a NaN stays one.
inline __m128i to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_add_epi32(bits, bias);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i y = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}

void store_fp32(const float* x, int n, void* dst) {
  memcpy(dst, x, static_cast<size_t>(n) * sizeof(float));
}

void store_bf16(const float* x, int n, void* dst) {
  uint16_t* y = static_cast<uint16_t*>(dst);
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), to_bf16(_mm256_loadu_ps(x + i)));
  }
  if (i < n) {
    float tail[8] = {};
    uint16_t rounded[8];
    memcpy(tail, x + i, static_cast<size_t>(n - i) * sizeof(float));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rounded), to_bf16(_mm256_loadu_ps(tail)));
    memcpy(y + i, rounded, static_cast<size_t>(n - i) * sizeof(uint16_t));
  }
}

template <class Out>
void swiglu(const float* x, size_t ldx, int m, void* out, size_t ldo) {
  const __m256 one = _mm256_set1_ps(1.0f);
  typename Out::Element* y = static_cast<typename Out::Element*>(out);
  for (int row = 0; row < m; ++row) {
    UNROLL for (int j = 0; j < kPanel; j += 8) {
      const __m256 g = _mm256_loadu_ps(x + row * ldx + j);
      const __m256 e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), g));
      const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, e));
      const __m256 up = _mm256_loadu_ps(x + row * ldx + kPanel + j);
      Out::store8(y + row * ldo + j, _mm256_mul_ps(silu, up));
    }
  }
}

struct Fp32Out {
  typedef float Element;
  static inline void store8(float* y, __m256 x) { _mm256_storeu_ps(y, x); }
};

struct Bf16Out {
  typedef uint16_t Element;
  static inline void store8(uint16_t* y, __m256 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), to_bf16(x));
  }
};

const KernelTable kTable = {
    "avx2",
    {kFloat32, kFloat32},
    {linear<Fp32Panel>, linear<Bf16Panel>},
    {swiglu<Fp32Out>, swiglu<Bf16Out>},
    rms_norm,
    rope,
    {store_fp32, store_bf16},
    {avx2::attention_fp32, avx2::attention_bf16},
};

}  // namespace

const KernelTable* avx2_kernels() { return &kTable; }

}  // namespace dualpace
