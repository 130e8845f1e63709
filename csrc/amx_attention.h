// Paged attention of one (row, KV head) to bfloat16 KV on tiles, over any tile unit.
//
// Both products read K and V as they lie in the pages, once for up to eight query heads:
//   scores   K (16 tokens x 32 dimensions) times queries, 16 columns: eight heads rounded to
//            bfloat16, and the remainders of the same heads, so that queries keep their precision
//   sums     weights times V (16 tokens x 32 dimensions, which the unit takes for 16 pairs). A pair is
//            two dimensions of one token, not two tokens of one dimension, so each weight meets it
//            twice: as (weight, 0) for the even dimensions, as (0, weight) for the odd ones. Rounded
//            weights and remainders again.
// Half of the second product's terms are zeros, which costs less than interleaving rows of V.
//
// Of the same tokens all KV heads of the call are attended to in turn, because these lie behind each
// other in a page: long stretches of memory are read faster than short ones.
//
// Included by units that are compiled for AVX-512; see avx512.h.
#pragma once

#include "amx_span.h"
#include "avx512.h"

#include <math.h>

namespace dualpace {
namespace {

constexpr int kBlockHeads = 8;  // query heads that share one pass over K and V

// Up to eight query heads.
struct HeadBlock {
  int heads;
  float* queries;  // [head_dim / 32] tiles: 16 pairs of dimensions x 16 columns, see above
  float* sums;     // [head_dim / 32] tiles: rows as in soften(), columns are pairs of dimensions
  float* state;    // [maxima of plain scores, denominators][8]
};

// What a call keeps in its scratch memory; attention.cpp knows how much that is.
struct Scratch {
  float* blocks;   // queries, sums and state of each block of heads
  float* scores;   // [8][kSpanTokens]
  float* weights;  // [block of tokens][1 or 2] tiles; before that, scores as the unit gives them
  char* tail;      // the rows of V in the last block of a run, zeros behind

  explicit Scratch(const AttentionArgs* args) : blocks(args->scratch) {
    scores = block(args->kv_heads, 0, args).queries;
    weights = scores + kBlockHeads * kSpanTokens;
    tail = reinterpret_cast<char*>(weights + 2 * kSpanBlocks * kTileFloats);
  }

  HeadBlock block(int kv_head, int index, const AttentionArgs* args) const {
    const int tiles = args->head_dim / 32 * kTileFloats;
    const int each = (args->group + kBlockHeads - 1) / kBlockHeads;
    const int left = args->group - index * kBlockHeads;
    float* base = blocks + (kv_head * each + index) * (2 * tiles + 2 * kBlockHeads);
    return {left < kBlockHeads ? left : kBlockHeads, base, base + tiles, base + 2 * tiles};
  }
};

// Elements 0 … 7 of row i and of the row four further, from rows of 16; i skips those.
inline __m512 two_rows(const float* rows, int i) {
  const float* p = rows + (i < 4 ? i : i + 4) * kTileRows;
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p)),
                            _mm256_loadu_ps(p + 4 * kTileRows), 1);
}

// From x[i] as two_rows() gives it for 16 rows, to x[j] = element j of every row.
inline void transpose(__m512 (&x)[8]) {
  __m512 y[8];
  UNROLL for (int i = 0; i < 8; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
    y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  UNROLL for (int j = 0; j < 4; ++j) {
    x[j] = _mm512_shuffle_f32x4(y[j], y[j + 4], 0x88);
    x[j + 4] = _mm512_shuffle_f32x4(y[j], y[j + 4], 0xdd);
  }
}

// Finite numbers rounded to bfloat16, in the high halves of their words; the low halves are zero.
inline __m512i round_high(__m512 x) {
  const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
}

// Query tiles of `heads` <= 8 heads; `columns` holds one tile.
inline void pack_queries(const float* query, int heads, int dim, float* columns, float* tiles) {
  for (int i = 0; i < kTileFloats; i += 16) _mm512_store_ps(columns + i, _mm512_setzero_ps());
  for (int i = 0; i < dim; i += 32, tiles += kTileFloats) {
    for (int h = 0; h < heads; ++h) {
      __m512 even = _mm512_loadu_ps(query + h * dim + i);
      __m512 odd = _mm512_loadu_ps(query + h * dim + i + 16);
      deinterleave(&even, &odd);
      const __m512i a = round_high(even), b = round_high(odd);
      const __m512i c = round_high(_mm512_sub_ps(even, _mm512_castsi512_ps(a)));
      const __m512i d = round_high(_mm512_sub_ps(odd, _mm512_castsi512_ps(b)));
      float* rounded = columns + h * kTileRows;
      float* remainder = rounded + kBlockHeads * kTileRows;
      _mm512_store_si512(rounded, _mm512_or_si512(_mm512_srli_epi32(a, 16), b));
      _mm512_store_si512(remainder, _mm512_or_si512(_mm512_srli_epi32(c, 16), d));
    }
    for (int half = 0; half < kTileRows; half += 8) {
      __m512 x[8];
      UNROLL for (int j = 0; j < 8; ++j) x[j] = two_rows(columns + half, j);
      transpose(x);
      UNROLL for (int j = 0; j < 8; ++j) {
        _mm512_store_ps(tiles + (half + j) * kTileRows, x[j]);
      }
    }
  }
}

// 32 dimensions of N <= 4 blocks of tokens, with the queries in register Q.
template <class T, int N, int Q>
inline void score_step(const char* const* keys, size_t row_bytes, int k, const float* queries,
                       Ahead* ahead) {
  const size_t at = static_cast<size_t>(k) * kTileRowBytes;
  T::template load<Q>(queries + k * kTileFloats, kTileRowBytes);
  T::template load<6>(keys[0] + at, row_bytes);
  T::template multiply<0, 6, Q>();
  ahead->step();
  if (N > 1) {
    T::template load<7>(keys[1] + at, row_bytes);
    T::template multiply<1, 7, Q>();
    ahead->step();
  }
  if (N > 2) {
    T::template load<6>(keys[2] + at, row_bytes);
    T::template multiply<2, 6, Q>();
    ahead->step();
  }
  if (N > 3) {
    T::template load<7>(keys[3] + at, row_bytes);
    T::template multiply<3, 7, Q>();
    ahead->step();
  }
}

// One tile of scores for each of N blocks: [token][rounded queries 0 … 7, remainders 0 … 7].
template <class T, int N>
inline void score(const char* const* keys, size_t row_bytes, int steps, const float* queries,
                  float* tiles, Ahead* ahead) {
  T::template zero<0>();
  if (N > 1) T::template zero<1>();
  if (N > 2) T::template zero<2>();
  if (N > 3) T::template zero<3>();
  int k = 0;
  for (; k + 2 <= steps; k += 2) {
    score_step<T, N, 4>(keys, row_bytes, k, queries, ahead);
    score_step<T, N, 5>(keys, row_bytes, k + 1, queries, ahead);
  }
  if (k < steps) score_step<T, N, 4>(keys, row_bytes, k, queries, ahead);
  T::template store<0>(tiles, kTileRowBytes);
  if (N > 1) T::template store<1>(tiles + kTileFloats, kTileRowBytes);
  if (N > 2) T::template store<2>(tiles + 2 * kTileFloats, kTileRowBytes);
  if (N > 3) T::template store<3>(tiles + 3 * kTileFloats, kTileRowBytes);
}

// Adds weights times values for N <= 4 tiles of sums, that is for 32 * N dimensions.
template <class T, int S, int N>
inline void weigh(const char* const* values, size_t row_bytes, int blocks, const float* weights,
                  float* sums, Ahead* ahead) {
  constexpr bool kTwo = S == kBlockHeads;  // remainders have a tile of their own
  T::template load<0>(sums, kTileRowBytes);
  if (N > 1) T::template load<1>(sums + kTileFloats, kTileRowBytes);
  if (N > 2) T::template load<2>(sums + 2 * kTileFloats, kTileRowBytes);
  if (N > 3) T::template load<3>(sums + 3 * kTileFloats, kTileRowBytes);
  for (int b = 0; b < blocks; ++b, weights += S / 4 * kTileFloats) {
    const char* v = values[b];
    T::template load<4>(weights, kTileRowBytes);
    if (kTwo) T::template load<5>(weights + kTileFloats, kTileRowBytes);
    T::template load<6>(v, row_bytes);
    T::template multiply<0, 4, 6>();
    ahead->step();
    if (N > 1) {
      T::template load<7>(v + kTileRowBytes, row_bytes);
      T::template multiply<1, 4, 7>();
      ahead->step();
    }
    if (kTwo) T::template multiply<0, 5, 6>();
    if (kTwo && N > 1) T::template multiply<1, 5, 7>();
    if (N > 2) {
      T::template load<6>(v + 2 * kTileRowBytes, row_bytes);
      T::template multiply<2, 4, 6>();
      ahead->step();
    }
    if (N > 3) {
      T::template load<7>(v + 3 * kTileRowBytes, row_bytes);
      T::template multiply<3, 4, 7>();
      ahead->step();
    }
    if (kTwo && N > 2) T::template multiply<2, 5, 6>();
    if (kTwo && N > 3) T::template multiply<3, 5, 7>();
  }
  T::template store<0>(sums, kTileRowBytes);
  if (N > 1) T::template store<1>(sums + kTileFloats, kTileRowBytes);
  if (N > 2) T::template store<2>(sums + 2 * kTileFloats, kTileRowBytes);
  if (N > 3) T::template store<3>(sums + 3 * kTileFloats, kTileRowBytes);
}

// Tiles of scores become scores[head][token], and the highest of each head: in tops[head][16].
inline void gather_scores(const Span& span, int heads, const float* tiles, float* scores,
                          float* tops, Ahead* ahead) {
  __m512 top[kBlockHeads];
  UNROLL for (int h = 0; h < kBlockHeads; ++h) top[h] = _mm512_set1_ps(-INFINITY);
  for (int b = 0; b < span.blocks; ++b, tiles += kTileFloats) {
    const int count = span.count - b * kTileRows;
    const __mmask16 exist = count < kTileRows ? first16(count) : static_cast<__mmask16>(0xffff);
    __m512 x[kBlockHeads];
    UNROLL for (int i = 0; i < kBlockHeads; ++i) {
      x[i] = _mm512_add_ps(two_rows(tiles, i), two_rows(tiles + kBlockHeads, i));
    }
    transpose(x);
    UNROLL for (int h = 0; h < kBlockHeads; ++h) {
      x[h] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), exist, x[h]);
      top[h] = _mm512_max_ps(top[h], x[h]);
      if (h < heads) _mm512_store_ps(scores + h * kSpanTokens + b * kTileRows, x[h]);
    }
    ahead->step();
  }
  UNROLL for (int h = 0; h < kBlockHeads; ++h) _mm512_store_ps(tops + h * kTileRows, top[h]);
}

// Scores of head h become weights in the tiles of each block: rows h and S + h hold (weight, 0) and
// (0, weight) of the rounded weights, the same rows 2 * S further those of the remainders. For S = 4
// all of these are rows of one tile. Sums so far fade if the maximum has grown.
template <int S>
inline void soften(const float* scores, int blocks, __m512 top, float scale, int h, float* state,
                   float* weights, float* sums, int num_sums) {
  float maximum = _mm512_reduce_max_ps(top);
  const float before = state[h];
  if (before > maximum) maximum = before;
  const __m512 base = _mm512_set1_ps(maximum), scales = _mm512_set1_ps(scale);
  __m512 total = _mm512_setzero_ps(), rest = _mm512_setzero_ps();
  float* row = weights + h * kTileRows;
  for (int b = 0; b < blocks; ++b, row += S / 4 * kTileFloats) {
    const __m512 x = _mm512_sub_ps(_mm512_load_ps(scores + b * kTileRows), base);
    const __m512 weight = exp16(_mm512_mul_ps(x, scales));
    const __m512i rounded = round_high(weight);
    const __m512i remainder = round_high(_mm512_sub_ps(weight, _mm512_castsi512_ps(rounded)));
    total = _mm512_add_ps(total, _mm512_castsi512_ps(rounded));
    rest = _mm512_add_ps(rest, _mm512_castsi512_ps(remainder));
    _mm512_store_si512(row, _mm512_srli_epi32(rounded, 16));
    _mm512_store_si512(row + S * kTileRows, rounded);
    _mm512_store_si512(row + 2 * S * kTileRows, _mm512_srli_epi32(remainder, 16));
    _mm512_store_si512(row + 3 * S * kTileRows, remainder);
  }
  float denominator = state[kBlockHeads + h];
  if (maximum > before) {
    const __m512 fade = exp16(_mm512_set1_ps((before - maximum) * scale));
    denominator *= _mm512_cvtss_f32(fade);
    for (int i = h; i < num_sums * kTileRows; i += S) {
      float* p = sums + i * kTileRows;
      _mm512_store_ps(p, _mm512_mul_ps(_mm512_load_ps(p), fade));
    }
  }
  state[h] = maximum;
  state[kBlockHeads + h] = denominator + _mm512_reduce_add_ps(_mm512_add_ps(total, rest));
}

// All there is to do with a span for up to S heads.
template <class T, int S>
inline void attend_span(const AttentionArgs* args, const Span& span, const char* base,
                        const char* const* values, const HeadBlock& block, const Scratch& scratch,
                        Ahead* ahead) {
  const int steps = args->head_dim / 32;
  const size_t row_bytes = static_cast<size_t>(args->head_dim) * 2;
  const char* keys[kSpanBlocks];
  for (int b = 0; b < span.blocks; ++b) keys[b] = base + span.offsets[b];
  for (int b = 0; b < span.blocks; b += 4) {
    float* to = scratch.weights + b * kTileFloats;
    switch (span.blocks - b) {
      case 1: score<T, 1>(keys + b, row_bytes, steps, block.queries, to, ahead); break;
      case 2: score<T, 2>(keys + b, row_bytes, steps, block.queries, to, ahead); break;
      case 3: score<T, 3>(keys + b, row_bytes, steps, block.queries, to, ahead); break;
      default: score<T, 4>(keys + b, row_bytes, steps, block.queries, to, ahead); break;
    }
  }

  alignas(64) float tops[kBlockHeads * kTileRows];
  gather_scores(span, block.heads, scratch.weights, scratch.scores, tops, ahead);
  for (int h = 0; h < block.heads; ++h) {
    soften<S>(scratch.scores + h * kSpanTokens, span.blocks, _mm512_load_ps(tops + h * kTileRows),
              args->scale, h, block.state, scratch.weights, block.sums, steps);
    ahead->step();
  }

  const char* from[kSpanBlocks];
  for (int i = 0; i < steps; i += 4) {
    for (int b = 0; b < span.blocks; ++b) from[b] = values[b] + i * kTileRowBytes;
    float* to = block.sums + i * kTileFloats;
    const float* weights = scratch.weights;
    switch (steps - i) {
      case 1: weigh<T, S, 1>(from, row_bytes, span.blocks, weights, to, ahead); break;
      case 2: weigh<T, S, 2>(from, row_bytes, span.blocks, weights, to, ahead); break;
      case 3: weigh<T, S, 3>(from, row_bytes, span.blocks, weights, to, ahead); break;
      default: weigh<T, S, 4>(from, row_bytes, span.blocks, weights, to, ahead); break;
    }
  }
}

// out[dim] of head h, from its rows of the tiles of sums.
template <int S>
inline void finish(const float* sums, int h, int dim, float factor, float* out) {
  const __m512 factors = _mm512_set1_ps(factor);
  const float* row = sums + h * kTileRows;
  for (int i = 0; i < dim; i += 32, row += kTileFloats) {
    __m512 even = _mm512_load_ps(row);
    __m512 odd = _mm512_load_ps(row + S * kTileRows);
    if (S < kBlockHeads) {
      even = _mm512_add_ps(even, _mm512_load_ps(row + 2 * S * kTileRows));
      odd = _mm512_add_ps(odd, _mm512_load_ps(row + 3 * S * kTileRows));
    }
    interleave(&even, &odd);
    _mm512_storeu_ps(out + i, _mm512_mul_ps(even, factors));
    _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(odd, factors));
  }
}

// The values of a block of which only `count` tokens exist: what lies behind may be anything, and
// a weight of zero does not silence a NaN.
inline void copy_tail(const char* values, int count, int row_bytes, char* tail) {
  for (int i = 0; i < kTileRows * row_bytes; i += 64) {
    const bool exists = i < count * row_bytes;
    _mm512_store_si512(tail + i, exists ? _mm512_loadu_si512(values + i) : _mm512_setzero_si512());
  }
}

template <class T>
void attention_on_tiles(const AttentionArgs* args) {
  const int dim = args->head_dim, group = args->group;
  if (dim % 32 != 0 || args->page_tokens % kTileRows != 0) {
    avx512::attention_bf16(args);
    return;
  }
  const Scratch scratch(args);
  const int num_blocks = (group + kBlockHeads - 1) / kBlockHeads;
  const int steps = dim / 32, row_bytes = dim * 2;
  for (int k = 0; k < args->kv_heads; ++k) {
    for (int i = 0; i < num_blocks; ++i) {
      const HeadBlock block = scratch.block(k, i, args);
      pack_queries(args->query + (k * group + i * kBlockHeads) * dim, block.heads, dim,
                   scratch.weights, block.queries);
      for (int j = 0; j < steps * kTileFloats; j += 16) {
        _mm512_store_ps(block.sums + j, _mm512_setzero_ps());
      }
      for (int h = 0; h < kBlockHeads; ++h) {
        block.state[h] = -INFINITY;
        block.state[kBlockHeads + h] = 0.0f;
      }
    }
  }
  T::configure(2 * kTileRows);  // every register in full

  Span spans[2];
  int64_t at = args->begin;
  fill(&spans[0], args, args->pages, at, args->end - at);
  for (int turn = 0; at < args->end; turn ^= 1) {
    const Span& span = spans[turn];
    Span* next = &spans[turn ^ 1];
    at += span.count;
    // What comes after the last head: the first one of the next span, of this call or the next.
    const char* next_keys = args->keys;
    const char* next_values = args->values;
    bool more = true;
    if (at < args->end) {
      fill(next, args, args->pages, at, args->end - at);
    } else if (args->next_keys) {
      const size_t page = static_cast<size_t>(*args->next_pages) * args->page_stride;
      next_keys = args->next_keys - page;
      next_values = args->next_values - page;
      fill(next, args, args->next_pages, 0, args->next_tokens);
    } else {
      more = false;
    }
    // Steps: one per tile of K, of V and of scores, and one per head.
    const int pauses = num_blocks * span.blocks * (2 * steps + 1) + group;
    const int lines = 2 * row_bytes * kTileRows / kFetchBytes;
    const int pace = (lines + pauses - 1) / pauses;

    for (int k = 0; k < args->kv_heads; ++k) {
      const char* keys = args->keys + static_cast<size_t>(k) * args->head_stride;
      const char* base = args->values + static_cast<size_t>(k) * args->head_stride;
      Ahead ahead = {keys + args->head_stride, base + args->head_stride, &span,
                     row_bytes * kTileRows, pace};
      if (k + 1 == args->kv_heads) {
        ahead = {next_keys, next_values, next, row_bytes * kTileRows, more ? pace : 0};
      }
      const char* values[kSpanBlocks];
      for (int b = 0; b < span.blocks; ++b) values[b] = base + span.offsets[b];
      if (span.count % kTileRows != 0) {
        const int last = span.blocks - 1;
        copy_tail(values[last], span.count % kTileRows, row_bytes, scratch.tail);
        values[last] = scratch.tail;
      }
      for (int i = 0; i < num_blocks; ++i) {
        const HeadBlock block = scratch.block(k, i, args);
        if (block.heads > 4) attend_span<T, 8>(args, span, keys, values, block, scratch, &ahead);
        else attend_span<T, 4>(args, span, keys, values, block, scratch, &ahead);
      }
    }
  }
  T::release();

  for (int h = 0; h < args->kv_heads * group; ++h) {
    const HeadBlock block = scratch.block(h / group, h % group / kBlockHeads, args);
    const int slot = h % group % kBlockHeads;
    const float denominator = block.state[kBlockHeads + slot];
    const float factor = args->maxima ? 1.0f : 1.0f / denominator;
    if (block.heads > 4) finish<8>(block.sums, slot, dim, factor, args->out + h * dim);
    else finish<4>(block.sums, slot, dim, factor, args->out + h * dim);
    if (args->maxima) {
      args->maxima[h] = block.state[slot] * args->scale;
      args->sums[h] = denominator;
    }
  }
}

}  // namespace
}  // namespace dualpace
