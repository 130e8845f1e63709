// Linear layers with 512-bit vectors, over any way P of turning stored weights into sums:
//   Element, Activation   stored types
//   kParts                multiply-adds that take up one pair of k
//   weight(w, part)       16 columns of one panel, from the 2 * 16 weights of a pair
//   activation(a, part)   what they are multiplied by, in every lane
//   add(sum, a, w)
// Included by translation units that are compiled for AVX-512; see avx512.h.
#pragma once

#include "avx512.h"

namespace dualpace {
namespace {

// Rows x panels of a block. Sums, the weights of a pair and one broadcast activation fit into 32
// registers, and there are fewer loads than multiply-adds.
constexpr int kMaxRows = 14;
constexpr int block_panels(int rows) { return rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }

// What of the activations stays in the second-level cache while all panels pass by, and what of a
// group of panels while all rows do.
constexpr size_t kActivationBytes = 384 << 10;
constexpr size_t kGroupBytes = 256 << 10;
// How far ahead, in pairs of k, weights are fetched where each is used once: longer than a memory
// access takes. Into the second-level cache: a core can wait for more lines there.
constexpr int kAheadPairs = 128;

struct Block {
  const void* a;     // first row, at the first k
  size_t lda;        // elements
  const void* w;     // first panel, at the first k
  size_t panel;      // bytes from one panel to the next
  int pairs;         // of k
  const char* soon;  // to be fetched meanwhile, in each panel: from here on,
  const char* next;  // after `turn` pairs from here on,
  int turn;
  int pace;  // so many bytes for each pair
  const float* bias;
  float* c;
  size_t ldc;  // elements
  int accumulate;
};

// c[R][16 * N] of one block. The hardware's prefetcher does not keep ahead of the arithmetic: it
// stops at the end of each 4 KiB. Reaching past the last panel is harmless: a prefetch never
// faults.
template <class P, int R, int N>
void linear_block(const Block* block) {
  typedef typename P::Activation Activation;
  typedef typename P::Element Element;
  const size_t lda = block->lda, stride = block->panel, panel = stride / sizeof(Element);
  const Element* w = static_cast<const Element*>(block->w);
  const Activation* a[(R + 2) / 3];  // of every third row: an address has room for two multiples
  UNROLL for (int i = 0; i < (R + 2) / 3; ++i) {
    a[i] = static_cast<const Activation*>(block->a) + 3 * i * lda;
  }
  __m512 sum[R][N];
  UNROLL for (int n = 0; n < N; ++n) {
    const __m512 start = block->bias ? _mm512_loadu_ps(block->bias + n * kPanel)
                                     : _mm512_setzero_ps();
    UNROLL for (int r = 0; r < R; ++r) sum[r][n] = start;
  }
  const char* ahead = block->soon;
  const int pace = block->pace;
  int left = block->turn;
  for (int rest = block->pairs - left;; left = rest, rest = 0) {
    for (; left > 0; --left) {
      UNROLL for (int n = 0; n < N; ++n) {
        _mm_prefetch(ahead + n * stride, _MM_HINT_T1);
        if (sizeof(Element) == 4) _mm_prefetch(ahead + n * stride + 64, _MM_HINT_T1);
      }
      ahead += pace;
      UNROLL for (int part = 0; part < P::kParts; ++part) {
        typename P::Vector weight[N];
        UNROLL for (int n = 0; n < N; ++n) weight[n] = P::weight(w + n * panel, part);
        UNROLL for (int r = 0; r < R; ++r) {
          const typename P::Vector x = P::activation(a[r / 3] + r % 3 * lda, part);
          UNROLL for (int n = 0; n < N; ++n) sum[r][n] = P::add(sum[r][n], x, weight[n]);
        }
      }
      w += 2 * kPanel;
      UNROLL for (int i = 0; i < (R + 2) / 3; ++i) a[i] += 2;
    }
    if (rest == 0) break;
    ahead = block->next;
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int n = 0; n < N; ++n) {
      float* c = block->c + r * block->ldc + n * kPanel;
      __m512 y = sum[r][n];
      if (block->accumulate) y = _mm512_add_ps(y, _mm512_loadu_ps(c));
      _mm512_storeu_ps(c, y);
    }
  }
}

typedef void (*BlockFunction)(const Block* block);

// The function for `rows` and `panels` <= block_panels(rows).
template <class P, int R = 1>
BlockFunction block_function(int rows, int panels) {
  if constexpr (R < kMaxRows) {
    if (rows > R) return block_function<P, R + 1>(rows, panels);
  }
  constexpr int kMost = block_panels(R);
  if constexpr (kMost == 4) {
    if (panels == 3) return linear_block<P, R, 3>;
  }
  return panels == 1   ? linear_block<P, R, 1>
         : panels == 2 ? linear_block<P, R, 2>
                       : linear_block<P, R, kMost>;
}

template <class P>
void linear(const LinearArgs* args) {
  constexpr size_t kPairBytes = 2 * kPanel * sizeof(typename P::Element);
  const int all_pairs = (args->k + kAlignK - 1) / kAlignK * kAlignK / 2;
  const size_t panel = static_cast<size_t>(all_pairs) * kPairBytes;
  const int passes = (args->m + kMaxRows - 1) / kMaxRows;
  const int most_rows = (args->m + passes - 1) / passes;
  const int group = block_panels(most_rows);

  // k is cut so that activations, and panels that are used more than once, stay in the cache.
  size_t most_pairs = kActivationBytes / (2 * sizeof(typename P::Activation)) /
                      static_cast<size_t>(args->m);
  if (passes > 1 && most_pairs > kGroupBytes / kPairBytes / static_cast<size_t>(group)) {
    most_pairs = kGroupBytes / kPairBytes / static_cast<size_t>(group);
  }
  if (most_pairs == 0) most_pairs = 1;
  const int cuts = static_cast<int>((static_cast<size_t>(all_pairs) + most_pairs - 1) / most_pairs);
  const int step = ((all_pairs + cuts - 1) / cuts + 15) / 16 * 16;

  for (int at = 0; at < all_pairs; at += step) {
    const int pairs = all_pairs - at < step ? all_pairs - at : step;
    const char* weights = args->panels + static_cast<size_t>(at) * kPairBytes;
    int panels = group;
    for (int p = 0; p < args->num_panels; p += panels) {
      if (panels > args->num_panels - p) panels = args->num_panels - p;
      Block block;
      block.lda = args->lda;
      block.ldc = args->ldc;
      block.w = weights + static_cast<size_t>(p) * panel;
      block.panel = panel;
      block.pairs = pairs;
      block.next = weights + static_cast<size_t>(p + panels) * panel;
      if (p + panels == args->num_panels && at + pairs < all_pairs) {
        block.next = weights + static_cast<size_t>(pairs) * kPairBytes;
      }
      if (passes == 1) {
        block.turn = pairs > kAheadPairs ? pairs - kAheadPairs : 0;
        block.soon = static_cast<const char*>(block.w) + (pairs - block.turn) * kPairBytes;
        if (block.turn == 0) block.soon = block.next;
        block.pace = kPairBytes;
      } else {
        block.turn = pairs;
        block.soon = block.next;
        block.pace = static_cast<int>(kPairBytes) / passes;
      }
      block.bias = args->bias && at == 0 ? args->bias + p * kPanel : nullptr;
      block.accumulate = args->accumulate || at > 0;
      int row = 0;
      for (int pass = passes; pass > 0; --pass) {
        const int rows = (args->m - row + pass - 1) / pass;
        block.a = static_cast<const typename P::Activation*>(args->a) +
                  static_cast<size_t>(row) * args->lda + 2 * at;
        block.c = args->c + static_cast<size_t>(row) * args->ldc + p * kPanel;
        block_function<P>(rows, panels)(&block);
        block.soon += static_cast<size_t>(pairs) * static_cast<size_t>(block.pace);
        row += rows;
      }
    }
  }
}

struct Fp32Weights {
  typedef float Element;
  typedef float Activation;
  typedef __m512 Vector;
  static constexpr int kParts = 2;
  static inline __m512 weight(const float* w, int part) {
    return _mm512_load_ps(w + part * kPanel);
  }
  static inline __m512 activation(const float* a, int part) { return _mm512_set1_ps(a[part]); }
  static inline __m512 add(__m512 sum, __m512 a, __m512 w) { return _mm512_fmadd_ps(a, w, sum); }
};

}  // namespace
}  // namespace dualpace
