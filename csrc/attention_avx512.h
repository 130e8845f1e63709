// Paged attention of one (row, KV head) with 512-bit vectors, over any cache C:
//   Element            stored type
//   Query              type of the queries that meet stored keys
//   Words              32 stored elements as they are loaded: load(p), and load_some(p, n) for n
//   query(x, n, q)     n <= 32 dimensions of a query, zeros behind
//   add(sum, q, k)     multiplies 32 dimensions
//   widen(words, a, b) 32 dimensions as floats, in whatever order
//   order(a, b)        puts them into the order of dimensions
// Included by translation units that are compiled for AVX-512; see avx512.h.
//
// Tokens go in tiles, across pages: scores of all heads, softmax, weighted sum. Sizes of heads that
// are no multiple of 32 end in a masked load, so that nothing is read behind a row.
#pragma once

#include "avx512.h"

#include <math.h>

namespace dualpace {
namespace {

// Tokens of a tile are taken from so many places in turn. A page holds a few KiB of one head; where
// pages are read one after the other, the hardware's prefetcher starts late in each and runs on
// behind its end. Many slow streams do not mislead it.
constexpr int kStreams = 8;

struct Tile {
  int count;
  size_t offsets[kTileTokens];  // of rows, in bytes from the K or V of this head in page 0
};

// Tokens of the next tile of a run of `left` tokens: about as many as in those after it.
inline int tile_size(int64_t left) {
  const int64_t tiles = (left + kTileTokens - 1) / kTileTokens;
  return static_cast<int>((left + tiles - 1) / tiles);
}

// Lists `count` tokens from `first` on, the last one again up to a multiple of four.
inline void fill(Tile* tile, const AttentionArgs* args, const int32_t* pages, int64_t first,
                 int count, size_t row_bytes) {
  const int32_t* page = pages + first / args->page_tokens;
  int slot = static_cast<int>(first % args->page_tokens);
  for (int j = 0; j < kStreams; ++j) {
    size_t* to = tile->offsets + j;
    for (int left = count / kStreams + (j < count % kStreams); left > 0;) {
      const int room = args->page_tokens - slot;
      const int run = left < room ? left : room;
      size_t offset = static_cast<size_t>(*page) * args->page_stride +
                      static_cast<size_t>(slot) * row_bytes;
      for (int i = 0; i < run; ++i, offset += row_bytes, to += kStreams) *to = offset;
      left -= run;
      slot += run;
      if (slot == args->page_tokens) {
        slot = 0;
        ++page;
      }
    }
  }
  for (int i = count; i % 4 != 0; ++i) tile->offsets[i] = tile->offsets[count - 1];
  tile->count = count;
}

// Asks for K or V of the next tile, a few rows in each step: evenly over all that is done with this
// one, for a core that waits for too many lines at once cannot even read its second-level cache.
struct Ahead {
  const char* base;
  const Tile* tile;
  int done;
  int pace;
  int row_bytes;

  inline void step() {
    const int end = done + pace < tile->count ? done + pace : tile->count;
    for (; done < end; ++done) {
      const char* p = base + tile->offsets[done];
      for (int i = 0; i < row_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
    }
  }
};

// Adds neighbours of two vectors: {a0+a2, b0+b2, a1+a3, b1+b3} in each 128 bits.
inline __m512 fold(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

// The sums of 4 vectors for each of H heads: 128-bit part h holds those of head h.
template <int H>
inline __m512 sums16(const __m512 (&x)[H][4]) {
  __m512 y[4];
  UNROLL for (int h = 0; h < 4; ++h) y[h] = _mm512_setzero_ps();
  UNROLL for (int h = 0; h < H; ++h) y[h] = fold(fold(x[h][0], x[h][2]), fold(x[h][1], x[h][3]));
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(y[0], y[1], 0x44),
                                 _mm512_shuffle_f32x4(y[0], y[1], 0xee));
  const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(y[2], y[3], 0x44),
                                 _mm512_shuffle_f32x4(y[2], y[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// scores[h][t] = q[h] · key[t] for H <= 4 heads and all tokens of a tile.
template <class C, int H>
inline void score(const typename C::Query* q, int width, const char* keys, const Tile& tile,
                  int dim, Ahead* ahead, float* scores) {
  for (int t = 0; t < tile.count; t += 4) {
    ahead->step();
    const typename C::Element* k[4];
    UNROLL for (int j = 0; j < 4; ++j) {
      k[j] = reinterpret_cast<const typename C::Element*>(keys + tile.offsets[t + j]);
    }
    __m512 sum[H][4];
    UNROLL for (int h = 0; h < H; ++h) {
      UNROLL for (int j = 0; j < 4; ++j) sum[h][j] = _mm512_setzero_ps();
    }
    int i = 0;
    for (; i + 32 <= dim; i += 32) {
      typename C::Words words[4];
      UNROLL for (int j = 0; j < 4; ++j) words[j] = C::load(k[j] + i);
      UNROLL for (int h = 0; h < H; ++h) {
        UNROLL for (int j = 0; j < 4; ++j) C::add(&sum[h][j], q + h * width + i, words[j]);
      }
    }
    if (i < dim) {
      UNROLL for (int j = 0; j < 4; ++j) {
        const typename C::Words words = C::load_some(k[j] + i, dim - i);
        UNROLL for (int h = 0; h < H; ++h) C::add(&sum[h][j], q + h * width + i, words);
      }
    }
    const __m512 all = sums16<H>(sum);
    _mm_storeu_ps(scores + t, _mm512_castps512_ps128(all));
    if (H > 1) _mm_storeu_ps(scores + kTileTokens + t, _mm512_extractf32x4_ps(all, 1));
    if (H > 2) _mm_storeu_ps(scores + 2 * kTileTokens + t, _mm512_extractf32x4_ps(all, 2));
    if (H > 3) _mm_storeu_ps(scores + 3 * kTileTokens + t, _mm512_extractf32x4_ps(all, 3));
  }
}

// sums[h] += p[h][t] · value[t] over the tokens of a tile, D blocks of 32 dimensions for H heads;
// with kSome only the first `some` dimensions of the (one) block exist.
template <class C, int H, int D, bool kSome>
inline void weigh(const float* p, const char* values, const Tile& tile, int some, Ahead* ahead,
                  float* sums, int width) {
  __m512 sum[H][2 * D];
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int j = 0; j < 2 * D; ++j) sum[h][j] = _mm512_load_ps(sums + h * width + 16 * j);
  }
  for (int t = 0; t < tile.count; ++t, ++p) {
    const typename C::Element* value =
        reinterpret_cast<const typename C::Element*>(values + tile.offsets[t]);
    if (t % 4 == 0) ahead->step();
    UNROLL for (int j = 0; j < D; ++j) {
      __m512 a, b;
      C::widen(kSome ? C::load_some(value, some) : C::load(value + 32 * j), &a, &b);
      UNROLL for (int h = 0; h < H; ++h) {
        const __m512 weight = _mm512_set1_ps(p[h * kTileTokens]);
        sum[h][2 * j] = _mm512_fmadd_ps(weight, a, sum[h][2 * j]);
        sum[h][2 * j + 1] = _mm512_fmadd_ps(weight, b, sum[h][2 * j + 1]);
      }
    }
  }
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int j = 0; j < 2 * D; ++j) _mm512_store_ps(sums + h * width + 16 * j, sum[h][j]);
  }
}

// Blocks of 32 dimensions whose sums for `heads` heads fit into the registers.
constexpr int value_blocks(int heads) { return heads <= 2 ? 4 : heads <= 4 ? 2 : 1; }

// All dimensions for H <= 8 heads; sums stay in registers.
template <class C, int H>
inline void weigh_all(const float* p, const char* values, const Tile& tile, int dim, Ahead* ahead,
                      float* sums, int width) {
  constexpr int D = value_blocks(H);
  const size_t block = 32 * sizeof(typename C::Element);
  int i = 0;
  for (; i + 32 * D <= dim; i += 32 * D, values += D * block) {
    weigh<C, H, D, false>(p, values, tile, 0, ahead, sums + i, width);
  }
  for (; i + 32 <= dim; i += 32, values += block) {
    weigh<C, H, 1, false>(p, values, tile, 0, ahead, sums + i, width);
  }
  if (i < dim) weigh<C, H, 1, true>(p, values, tile, dim - i, ahead, sums + i, width);
}

// One head's scores of `count` tokens become weights; sums so far fade if the maximum has grown.
// state: running maximum of the plain scores, and denominator.
inline void soften(float* s, int count, float scale, float* state, float* sums, int width) {
  const int full = (count + 15) / 16 * 16;
  if (count < full) {
    const __mmask16 behind = static_cast<__mmask16>(~first16(count % 16));
    _mm512_mask_storeu_ps(s + full - 16, behind, _mm512_set1_ps(-INFINITY));
  }
  __m512 top = _mm512_loadu_ps(s);
  for (int t = 16; t < full; t += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(s + t));
  float maximum = _mm512_reduce_max_ps(top);
  const float before = state[0];
  if (before > maximum) maximum = before;
  const __m512 base = _mm512_set1_ps(maximum), scales = _mm512_set1_ps(scale);
  __m512 total = _mm512_setzero_ps();
  for (int t = 0; t < full; t += 16) {
    const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(s + t), base);
    const __m512 e = exp16(_mm512_mul_ps(x, scales));
    _mm512_storeu_ps(s + t, e);
    total = _mm512_add_ps(total, e);
  }
  float denominator = state[1];
  if (maximum > before) {
    const __m512 fade = exp16(_mm512_set1_ps((before - maximum) * scale));
    denominator *= _mm512_cvtss_f32(fade);
    for (int i = 0; i < width; i += 16) {
      _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), fade));
    }
  }
  state[0] = maximum;
  state[1] = denominator + _mm512_reduce_add_ps(total);
}

template <class C>
void attention(const AttentionArgs* args) {
  typedef typename C::Query Query;
  const int dim = args->head_dim, group = args->group;
  const int width = (dim + 31) / 32 * 32;
  const size_t row_bytes = static_cast<size_t>(dim) * sizeof(typename C::Element);
  float* sums = args->scratch;                   // [group][width]
  float* scores = sums + group * width;          // [group][kTileTokens]
  float* state = scores + group * kTileTokens;   // [group][2]
  Query* q = reinterpret_cast<Query*>(state + (2 * group + 15) / 16 * 16);  // [group][width]

  for (int h = 0; h < group; ++h) {
    for (int i = 0; i < width; i += 32) {
      C::query(args->query + h * dim + i, dim - i < 32 ? dim - i : 32, q + h * width + i);
      _mm512_store_ps(sums + h * width + i, _mm512_setzero_ps());
      _mm512_store_ps(sums + h * width + i + 16, _mm512_setzero_ps());
    }
    state[2 * h] = -INFINITY;
    state[2 * h + 1] = 0.0f;
  }

  // How often a row of K and of V is come back to.
  const int key_passes = (group + 3) / 4;
  const int blocks = value_blocks(group);
  const int value_passes = (group + 7) / 8 * ((width / 32 + blocks - 1) / blocks);
  Tile tiles[2];
  int64_t at = args->begin;
  fill(&tiles[0], args, args->pages, at, tile_size(args->end - at), row_bytes);
  for (int turn = 0; at < args->end; turn ^= 1) {
    const Tile& tile = tiles[turn];
    Tile* next = &tiles[turn ^ 1];
    at += tile.count;
    const char* next_keys = args->keys;
    const char* next_values = args->values;
    next->count = 0;
    if (at < args->end) {
      fill(next, args, args->pages, at, tile_size(args->end - at), row_bytes);
    } else if (args->next_keys) {
      const size_t page = static_cast<size_t>(*args->next_pages) * args->page_stride;
      next_keys = args->next_keys - page;
      next_values = args->next_values - page;
      fill(next, args, args->next_pages, 0, tile_size(args->next_tokens), row_bytes);
    }
    const int bytes = static_cast<int>(row_bytes);
    const auto pace = [&](int passes) {
      const int steps = (tile.count + 3) / 4 * passes;
      return (next->count + steps - 1) / steps;
    };
    Ahead keys_ahead = {next_keys, next, 0, pace(key_passes), bytes};
    Ahead values_ahead = {next_values, next, 0, pace(value_passes), bytes};

    int h = 0;
    while (h < group) {
      const int heads = group - h < 4 ? group - h : 4;
      const Query* some = q + h * width;
      float* to = scores + h * kTileTokens;
      switch (heads) {
        case 1: score<C, 1>(some, width, args->keys, tile, dim, &keys_ahead, to); break;
        case 2: score<C, 2>(some, width, args->keys, tile, dim, &keys_ahead, to); break;
        case 3: score<C, 3>(some, width, args->keys, tile, dim, &keys_ahead, to); break;
        default: score<C, 4>(some, width, args->keys, tile, dim, &keys_ahead, to); break;
      }
      h += heads;
    }

    for (h = 0; h < group; ++h) {
      soften(scores + h * kTileTokens, tile.count, args->scale, state + 2 * h, sums + h * width,
             width);
    }

    h = 0;
    while (h < group) {
      const int heads = group - h < 8 ? group - h : 8;
      const float* p = scores + h * kTileTokens;
      const char* v = args->values;
      float* to = sums + h * width;
      switch (heads) {
        case 1: weigh_all<C, 1>(p, v, tile, dim, &values_ahead, to, width); break;
        case 2: weigh_all<C, 2>(p, v, tile, dim, &values_ahead, to, width); break;
        case 3: weigh_all<C, 3>(p, v, tile, dim, &values_ahead, to, width); break;
        case 4: weigh_all<C, 4>(p, v, tile, dim, &values_ahead, to, width); break;
        case 5: weigh_all<C, 5>(p, v, tile, dim, &values_ahead, to, width); break;
        case 6: weigh_all<C, 6>(p, v, tile, dim, &values_ahead, to, width); break;
        case 7: weigh_all<C, 7>(p, v, tile, dim, &values_ahead, to, width); break;
        default: weigh_all<C, 8>(p, v, tile, dim, &values_ahead, to, width); break;
      }
      h += heads;
    }
  }

  for (int h = 0; h < group; ++h) {
    const __m512 factor =
        _mm512_set1_ps(args->maxima ? 1.0f : 1.0f / state[2 * h + 1]);
    for (int i = 0; i < dim; i += 32) {
      __m512 a = _mm512_mul_ps(_mm512_load_ps(sums + h * width + i), factor);
      __m512 b = _mm512_mul_ps(_mm512_load_ps(sums + h * width + i + 16), factor);
      C::order(&a, &b);
      const __mmask32 mask = first32(dim - i < 32 ? dim - i : 32);
      float* out = args->out + h * dim + i;
      _mm512_mask_storeu_ps(out, static_cast<__mmask16>(mask), a);
      _mm512_mask_storeu_ps(out + 16, static_cast<__mmask16>(mask >> 16), b);
    }
    if (args->maxima) {
      args->maxima[h] = state[2 * h] * args->scale;
      args->sums[h] = state[2 * h + 1];
    }
  }
}

// 32 bfloat16, which widen into the even and the odd dimensions.
struct Bf16Values {
  typedef uint16_t Element;
  typedef __m512i Words;
  static inline __m512i load(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static inline __m512i load_some(const uint16_t* p, int n) {
    return _mm512_maskz_loadu_epi16(first32(n), p);
  }
  static inline void widen(__m512i words, __m512* a, __m512* b) {
    *a = widen_even(words);
    *b = widen_odd(words);
  }
  static inline void order(__m512* a, __m512* b) { interleave(a, b); }
};

}  // namespace
}  // namespace dualpace
