// Paged attention of one (row, KV head) for AVX2 + FMA.
#include "avx2.h"

#include <math.h>
#include <string.h>

namespace dualpace {
namespace {

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

// Asks for the next `bytes` of what is read later; returns where they end. Null: nothing to ask.
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

}  // namespace

namespace avx2 {

void attention_fp32(const AttentionArgs* args) { attention<Fp32Cache>(args); }
void attention_bf16(const AttentionArgs* args) { attention<Bf16Cache>(args); }

}  // namespace avx2
}  // namespace dualpace
