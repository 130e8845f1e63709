// Linear layers: packing of weights, and the share of one thread in a product.
//
// Knows the packed layout of kernels.h; does not know what a layer is for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "linear_tiles.h"
#include "thread_pool.h"

namespace dualpace {

constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

constexpr size_t element_bytes(DType dtype) { return dtype == kBFloat16 ? 2 : 4; }

constexpr size_t panel_bytes(int k, DType dtype) {
  return static_cast<size_t>(round_up(k, kAlignK)) * kPanel * element_bytes(dtype);
}

constexpr size_t packed_bytes(int n, int k, DType dtype) {
  return static_cast<size_t>(round_up(n, kPanel) / kPanel) * panel_bytes(k, dtype);
}

// Row stride, in elements, of activations with `k` features: zeros behind them up to a multiple of
// kAlignK, and off multiples of 512 bytes, where rows would fall into the same cache sets.
constexpr size_t activation_stride(int k) {
  const int padded = round_up(k, kAlignK);
  return static_cast<size_t>(padded % 256 == 0 ? padded + kAlignK : padded);
}

// Row stride, in floats, of the sums of a layer with `n` columns.
constexpr size_t output_stride(int n) {
  const int padded = round_up(n, kPanel);
  return static_cast<size_t>(padded % 256 == 0 ? padded + kPanel : padded);
}

// A packed W[n][k], with optional bias[round_up(n, kPanel)].
struct Linear {
  char* panels = nullptr;
  float* bias = nullptr;
  int n = 0;
  int k = 0;
  DType dtype = kFloat32;

  int num_panels() const { return round_up(n, kPanel) / kPanel; }
  const char* panel(int index) const {
    return panels + static_cast<size_t>(index) * panel_bytes(k, dtype);
  }
};

// Row-major weights [rows][k] as they come from a checkpoint.
struct Source {
  const void* data = nullptr;
  DType dtype = kFloat32;

  float at(size_t index) const;
};

// Writes source rows [first, last) as output columns of `linear`. Row r becomes column `column` + r,
// and with `interleave` 2 panels are dealt out in turn (panel 2i + `offset` has rows 16i …), which
// puts gate and up side by side.
void pack_rows(const Linear& linear, const Source& source, int first, int last, int column,
               int interleave, int offset);

// out[k] = row `row` of the packed weights, widened.
void unpack_row(const Linear& linear, int row, float* out);

// The part of `count` items that falls to `part` of `parts`.
Range share(int count, int part, int parts);

// c[m][n] = a[m][k] · Wᵀ (+ bias) (+ c), the columns shared among the threads of `pool`, all of
// which call it between two barriers. `a` is of the kernels' activation type; rows of c are at
// least round_up(n, kPanel) apart. `scratch` has been reserved for this size, or a larger one.
void run_linear(const KernelTable& kernels, const Linear& linear, const void* a, size_t lda, int m,
                float* c, size_t ldc, bool accumulate, TileScratch& scratch, ThreadPool& pool);

// Gate and up panels that run_swiglu computes before it combines them. Enough of them for reading
// the activations to cost less than reading the weights.
constexpr int kSwigluPairs = 8;

// out[m][n/2] = silu(gate) * up, of the kernels' activation type, for interleaved gate and up
// weights. `tile`, the thread's own, holds m * kSwigluPairs * 2 * 16 floats. Shared as above.
void run_swiglu(const KernelTable& kernels, const Linear& gate_up, const void* a, size_t lda,
                int m, void* out, size_t ldo, float* tile, TileScratch& scratch,
                ThreadPool& pool);

}  // namespace dualpace
