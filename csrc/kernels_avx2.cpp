// Kernels for AVX2 + FMA. Everything but the table is in an unnamed namespace, and no C++ library
// header is included: nothing compiled here with AVX2 flags can be picked by the linker for others.
#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 16")

namespace dualpace {
namespace {

// ---- vector helpers ---------------------------------------------------------------------------

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
void linear(const float* a, size_t lda, int m, int k, const void* panel, const float* bias,
            float* c, size_t ldc, int accumulate) {
  const typename P::Element* w = static_cast<const typename P::Element*>(panel);
  const size_t ahead = static_cast<size_t>((k + kAlignK - 1) / kAlignK * kAlignK) * kPanel;
  // Blocks of at most five rows and of almost equal height: 8 rows are 4 + 4, not 5 + 3. Five rows
  // fill the 16 registers (10 sums, two raw and two widened vectors, mask, x); six spill and lose a
  // third of the speed.
  for (int blocks = (m + 4) / 5; blocks > 0; --blocks) {
    const int rows = (m + blocks - 1) / blocks;
    switch (rows) {
      case 1: linear_rows<P, 1>(a, lda, k, w, ahead, bias, c, ldc, accumulate); break;
      case 2: linear_rows<P, 2>(a, lda, k, w, ahead, bias, c, ldc, accumulate); break;
      case 3: linear_rows<P, 3>(a, lda, k, w, ahead, bias, c, ldc, accumulate); break;
      case 4: linear_rows<P, 4>(a, lda, k, w, ahead, bias, c, ldc, accumulate); break;
      default: linear_rows<P, 5>(a, lda, k, w, ahead, bias, c, ldc, accumulate); break;
    }
    a += rows * lda;
    c += rows * ldc;
    m -= rows;
  }
}

// ---- element-wise -----------------------------------------------------------------------------

void swiglu(const float* gate, const float* up, int m, float* out, size_t ldo) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int row = 0; row < m; ++row) {
    UNROLL for (int j = 0; j < kPanel; j += 8) {
      const __m256 g = _mm256_loadu_ps(gate + row * kPanel + j);
      const __m256 e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), g));
      const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, e));
      _mm256_storeu_ps(out + row * ldo + j,
                       _mm256_mul_ps(silu, _mm256_loadu_ps(up + row * kPanel + j)));
    }
  }
}

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

// ---- attention --------------------------------------------------------------------------------

// How 16 stored elements become two vectors. For bfloat16 the cheap split is into even and odd
// dimensions, so queries go in and sums come out in that order: position i of a block of 16 holds
// dimension `dim(i)`.
struct Fp32Cache {
  typedef float Element;
  static inline int dim(int i) { return i; }
  static inline void load16(const float* p, __m256* a, __m256* b) {
    *a = _mm256_loadu_ps(p);
    *b = _mm256_loadu_ps(p + 8);
  }
};

struct Bf16Cache {
  typedef uint16_t Element;
  static inline int dim(int i) { return i < 8 ? 2 * i : 2 * i - 15; }
  static inline void load16(const uint16_t* p, __m256* a, __m256* b) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    *a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    *b = _mm256_castsi256_ps(_mm256_and_si256(words, high_halves()));
  }
};

// Asks for the next `bytes` of what is read later, and returns where they end. Null: nothing to ask.
inline const char* prefetch(const char* p, int bytes) {
  if (p == nullptr) return p;
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
  return p + bytes;
}

// scores[h][t] = q[h] · key[t] for H heads and T tokens (T is 4 or 1).
template <class C, int H, int T>
inline void score(const float* q, int width, const typename C::Element* key, int stride,
                  float* scores) {
  __m256 acc[H][T];
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int t = 0; t < T; ++t) acc[h][t] = _mm256_setzero_ps();
  }
  for (int i = 0; i < width; i += 16) {
    UNROLL for (int t = 0; t < T; ++t) {
      __m256 a, b;
      C::load16(key + t * stride + i, &a, &b);
      UNROLL for (int h = 0; h < H; ++h) {
        const float* x = q + h * width + i;
        acc[h][t] = _mm256_fmadd_ps(a, _mm256_load_ps(x), acc[h][t]);
        acc[h][t] = _mm256_fmadd_ps(b, _mm256_load_ps(x + 8), acc[h][t]);
      }
    }
  }
  UNROLL for (int h = 0; h < H; ++h) {
    float* out = scores + h * kTileTokens;
    if constexpr (T == 4) {
      _mm_storeu_ps(out, sum8x4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]));
    } else {
      UNROLL for (int t = 0; t < T; ++t) out[t] = sum8(acc[h][t]);
    }
  }
}

template <class C, int H>
inline void score_tile(const float* q, int width, const typename C::Element* key, int stride,
                       int count, const char* ahead, float* scores) {
  int t = 0;
  for (; t + 4 <= count; t += 4) {
    ahead = prefetch(ahead, 4 * stride * static_cast<int>(sizeof(*key)));
    score<C, H, 4>(q, width, key + t * stride, stride, scores + t);
  }
  for (; t < count; ++t) score<C, H, 1>(q, width, key + t * stride, stride, scores + t);
}

// sums[h] += p[h][t] · value[t], D blocks of 16 dimensions at a time for H heads.
template <class C, int H, int D>
inline void weigh(const float* p, int width, const typename C::Element* value, int stride,
                  int count, const char* ahead, float* sums) {
  __m256 acc[H][2 * D];
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int j = 0; j < 2 * D; ++j) acc[h][j] = _mm256_load_ps(sums + h * width + 8 * j);
  }
  for (int t = 0; t < count; ++t, value += stride) {
    ahead = prefetch(ahead, stride * static_cast<int>(sizeof(*value)));
    UNROLL for (int j = 0; j < D; ++j) {
      __m256 a, b;
      C::load16(value + 16 * j, &a, &b);
      UNROLL for (int h = 0; h < H; ++h) {
        const __m256 weight = _mm256_broadcast_ss(p + h * kTileTokens + t);
        acc[h][2 * j] = _mm256_fmadd_ps(weight, a, acc[h][2 * j]);
        acc[h][2 * j + 1] = _mm256_fmadd_ps(weight, b, acc[h][2 * j + 1]);
      }
    }
  }
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int j = 0; j < 2 * D; ++j) _mm256_store_ps(sums + h * width + 8 * j, acc[h][j]);
  }
}

template <class C, int H>
inline void weigh_tile(const float* p, int width, const typename C::Element* value, int stride,
                       int count, const char* ahead, float* sums) {
  int i = 0;
  for (; i + 32 <= width; i += 32) {
    weigh<C, H, 2>(p, width, value + i, stride, count, i == 0 ? ahead : nullptr, sums + i);
  }
  if (i < width) weigh<C, H, 1>(p, width, value + i, stride, count, nullptr, sums + i);
}

// Copies rows of `dim` elements to rows of `width`, zeros behind: only odd head sizes come here.
template <class Element>
inline const Element* pad_rows(const Element* rows, int dim, int width, int count, Element* out) {
  for (int t = 0; t < count; ++t) {
    memcpy(out + t * width, rows + t * dim, static_cast<size_t>(dim) * sizeof(Element));
    memset(out + t * width + dim, 0, static_cast<size_t>(width - dim) * sizeof(Element));
  }
  return out;
}

// Offset of token `t` in the K or V of one head.
template <class C>
inline size_t place(const AttentionArgs* args, int64_t t) {
  const size_t page = static_cast<size_t>(args->pages[t / args->page_tokens]);
  const size_t slot = static_cast<size_t>(t % args->page_tokens);
  return page * args->page_stride +
         slot * static_cast<size_t>(args->head_dim) * sizeof(typename C::Element);
}

template <class C>
void attention(const AttentionArgs* args) {
  typedef typename C::Element Element;
  const int dim = args->head_dim, group = args->group;
  const int width = (dim + 15) / 16 * 16;
  float* q = args->scratch;                // [group][width]
  float* sums = q + group * width;         // [group][width]
  float* scores = sums + group * width;    // [group][kTileTokens]
  float* state = scores + group * kTileTokens;  // [group][2] running maximum, denominator
  Element* padded = reinterpret_cast<Element*>(state + (2 * group + 15) / 16 * 16);

  for (int h = 0; h < group; ++h) {
    for (int i = 0; i < width; ++i) {
      const int from = i / 16 * 16 + C::dim(i % 16);
      q[h * width + i] = from < dim ? args->query[h * dim + from] * args->scale : 0.0f;
      sums[h * width + i] = 0.0f;
    }
    state[2 * h] = -INFINITY;
    state[2 * h + 1] = 0.0f;
  }

  for (int64_t begin = args->begin; begin < args->end;) {
    int64_t room = args->page_tokens - begin % args->page_tokens;
    if (room > args->end - begin) room = args->end - begin;
    if (room > kTileTokens) room = kTileTokens;
    const int count = static_cast<int>(room);
    const size_t here = place<C>(args, begin);
    const Element* key = reinterpret_cast<const Element*>(args->keys + here);
    const Element* value = reinterpret_cast<const Element*>(args->values + here);
    // A page holds a few KiB of one head, too little for the hardware's prefetcher to get going.
    const char* next_key = args->next_keys;
    const char* next_value = args->next_values;
    if (begin + count < args->end) {
      const size_t there = place<C>(args, begin + count);
      next_key = args->keys + there;
      next_value = args->values + there;
    }

    if (width != dim) key = pad_rows(key, dim, width, count, padded);
    int h = 0;
    for (; h + 3 <= group && group - h != 4; h += 3) {
      score_tile<C, 3>(q + h * width, width, key, width, count, h == 0 ? next_key : nullptr,
                       scores + h * kTileTokens);
    }
    for (; h + 2 <= group; h += 2) {
      score_tile<C, 2>(q + h * width, width, key, width, count, h == 0 ? next_key : nullptr,
                       scores + h * kTileTokens);
    }
    if (h < group) {
      score_tile<C, 1>(q + h * width, width, key, width, count, h == 0 ? next_key : nullptr,
                       scores + h * kTileTokens);
    }

    const int full = (count + 7) / 8 * 8;
    for (h = 0; h < group; ++h) {
      float* s = scores + h * kTileTokens;
      for (int t = count; t < full; ++t) s[t] = -INFINITY;
      __m256 top = _mm256_loadu_ps(s);
      for (int t = 8; t < full; t += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(s + t));
      const float before = state[2 * h];
      float maximum = max8(top);
      if (before > maximum) maximum = before;
      const __m256 base = _mm256_set1_ps(maximum);
      __m256 total = _mm256_setzero_ps();
      for (int t = 0; t < full; t += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(s + t), base));
        _mm256_storeu_ps(s + t, e);
        total = _mm256_add_ps(total, e);
      }
      float denominator = state[2 * h + 1];
      if (maximum > before) {
        const float fade = before == -INFINITY ? 0.0f : exp1(before - maximum);
        denominator *= fade;
        const __m256 fades = _mm256_set1_ps(fade);
        for (int i = 0; i < width; i += 8) {
          float* o = sums + h * width + i;
          _mm256_store_ps(o, _mm256_mul_ps(_mm256_load_ps(o), fades));
        }
      }
      state[2 * h] = maximum;
      state[2 * h + 1] = denominator + sum8(total);
    }

    if (width != dim) value = pad_rows(value, dim, width, count, padded);
    h = 0;
    for (; h + 3 <= group && group - h != 4; h += 3) {
      weigh_tile<C, 3>(scores + h * kTileTokens, width, value, width, count,
                       h == 0 ? next_value : nullptr, sums + h * width);
    }
    for (; h + 2 <= group; h += 2) {
      weigh_tile<C, 2>(scores + h * kTileTokens, width, value, width, count,
                       h == 0 ? next_value : nullptr, sums + h * width);
    }
    if (h < group) {
      weigh_tile<C, 1>(scores + h * kTileTokens, width, value, width, count,
                       h == 0 ? next_value : nullptr, sums + h * width);
    }
    begin += count;
  }

  for (int h = 0; h < group; ++h) {
    const float factor = args->maxima ? 1.0f : 1.0f / state[2 * h + 1];
    for (int i = 0; i < width; ++i) {
      const int to = i / 16 * 16 + C::dim(i % 16);
      if (to < dim) args->out[h * dim + to] = sums[h * width + i] * factor;
    }
    if (args->maxima) {
      args->maxima[h] = state[2 * h];
      args->sums[h] = state[2 * h + 1];
    }
  }
}

const KernelTable kTable = {
    "avx2",
    {linear<Fp32Panel>, linear<Bf16Panel>},
    swiglu,
    rms_norm,
    rope,
    {store_fp32, store_bf16},
    {attention<Fp32Cache>, attention<Bf16Cache>},
};

}  // namespace

const KernelTable* avx2_kernels() { return &kTable; }

}  // namespace dualpace
