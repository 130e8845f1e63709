// The table of kernels that every instruction set provides, and the layouts they agree on.
//
// Knows raw pointers and sizes only. Each table lives in translation units of its own, compiled
// with their own flags. This header must therefore never hold code: an inline function compiled
// with AVX2 flags in one unit could be the copy that the linker keeps for all of them (SIGILL).
//
// Packed weights. A linear layer W[n][k] is stored as panels of 16 output columns:
//   bfloat16  [ceil(n/16)][kPad/2][16][2]   pairs along k in one 32-bit word
//   float32   [ceil(n/16)][kPad][16]
// with kPad = k rounded up to 32 and every padded element zero. 16 pairs x 16 columns are one
// contiguous KiB, which is also what a tile or a dot-product unit wants to read.
//
// KV pages. [page][layer][2 (K,V)][kv_head][page_tokens][head_dim], row-major.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace dualpace {

enum DType { kFloat32 = 0, kBFloat16 = 1 };
enum { kNumDTypes = 2 };

enum {
  kPanel = 16,       // output columns of a packed panel
  kAlignK = 32,      // k of packed weights is padded to a multiple of this
  kTileTokens = 128  // most tokens whose scores are held at once; a multiple of 64
};

// One run of tokens of one row and some of its KV heads: attends with `group` query heads for each of
// those to [begin, end).
struct AttentionArgs {
  const float* query;  // [kv_heads][group][head_dim], rotated, unscaled
  const char* keys;    // arena + offset of this layer's and the first head's K inside a page
  const char* values;  // the same for V
  size_t page_stride;  // bytes from one page to the next
  size_t head_stride;  // bytes from one KV head to the next inside a page
  const char* next_keys;    // what the thread reads after this run, to prefetch; or null
  const char* next_values;
  const int32_t* next_pages;  // from the page of `next_keys` on
  int64_t next_tokens;
  const int32_t* pages;
  int64_t begin, end;  // end > begin
  int32_t page_tokens;
  int32_t head_dim;
  int32_t kv_heads;  // 1, or more where KernelTable::heads_together allows it
  int32_t group;
  float scale;
  float* out;      // [kv_heads][group][head_dim]
  float* maxima;   // [kv_heads][group], or null: then `out` is normalised, else the plain weighted sum
  float* sums;     // [kv_heads][group], with `maxima`
  float* scratch;  // 64-byte aligned, attention_scratch_floats() long
};

// Activations and the part of k for kernels on tiles. Row r's values of step s, which is k from
// 32 s on, lie at (r / 16) * tile + s * step + (r % 16) * row bytes.
struct TileArgs {
  size_t row, step, tile;
  int first, last;  // the steps that are multiplied; the panels are whole
};

// c[m][16 * num_panels] = a[m][k] · panelsᵀ (+ bias) (+ c, if accumulate).
struct LinearArgs {
  const void* a;  // rows `lda` elements apart, of KernelTable::activations; zero from k to kPad
  size_t lda;
  int m;  // > 0
  int k;
  const char* panels;  // packed, one behind the other
  int num_panels;
  const float* bias;  // [16 * num_panels], or null
  float* c;           // rows `ldc` floats apart
  size_t ldc;
  int accumulate;
  TileArgs tiles;  // instead of lda, if KernelTable::on_tiles
};

struct KernelTable {
  const char* name;

  // Type of the activations that go into linear layers, by type of the weights.
  DType activations[kNumDTypes];

  void (*linear[kNumDTypes])(const LinearArgs* args);

  // out[m][16], of the type in the index, = silu(gate) * up: x[m][32] holds 16 gate values and then
  // 16 up values per row, rows `ldx` floats apart; `ldo` counts elements.
  void (*swiglu[kNumDTypes])(const float* x, size_t ldx, int m, void* out, size_t ldo);

  // y[n] = x[n] / sqrt(mean(x^2) + eps) * weight[n]; y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);

  // Rotates x[2*half] in place, pairing i with i + half.
  void (*rope)(float* x, const float* cosine, const float* sine, int half);

  // dst[n] (of the KV type) = x[n], rounded to nearest even.
  void (*store[kNumDTypes])(const float* x, int n, void* dst);

  void (*attention[kNumDTypes])(const AttentionArgs* args);

  // True if linear[kBFloat16] works on tiles.
  bool on_tiles = false;

  // True if attention[kBFloat16] takes several KV heads at once, where head_dim is a multiple of 32
  // and page_tokens one of 16.
  bool heads_together = false;
};

const KernelTable* portable_kernels();
#ifdef DUALPACE_HAVE_AVX2
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx512_bf16_kernels();
#endif

}  // namespace dualpace
