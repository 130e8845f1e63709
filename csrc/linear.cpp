#include "linear.h"

#include <algorithm>
#include <cstring>

namespace dualpace {
namespace {

float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

constexpr int kLinearPanels = 8;  // what a kernel call should have at least, where there are enough
constexpr int kPartsPerThread = 6;  // that there should be at least

// The least items that a thread takes at a time: `unit`, unless that makes too few parts.
int least_part(int count, int threads, int unit, int smallest) {
  const int fair = count / (threads * kPartsPerThread);
  return std::max(smallest, std::min(fair, unit) / smallest * smallest);
}

// Index of element (column of its panel, k) inside a panel.
size_t panel_index(DType dtype, int column, int k) {
  return dtype == kBFloat16 ? static_cast<size_t>(k / 2) * 2 * kPanel + column * 2 + k % 2
                            : static_cast<size_t>(k) * kPanel + column;
}

// The rows of a panel share its cache lines: after so many elements of one comes the next, while the
// lines are still in the first-level cache. Even, so that pairs stay together.
constexpr size_t kPackedAtATime = 256;

// Elements [from, from + count) of a row to their places in a panel, the first of them at `to`.
void pack_run(DType dtype, const Source& source, size_t from, size_t count, char* to) {
  if (dtype == kFloat32) {
    float* out = reinterpret_cast<float*>(to);
    for (size_t i = 0; i < count; ++i) out[i * kPanel] = source.at(from + i);
  } else if (source.dtype == kBFloat16) {
    const uint16_t* in = static_cast<const uint16_t*>(source.data) + from;
    for (size_t i = 0; i + 1 < count; i += 2) {
      std::memcpy(to + i * kPanel * sizeof *in, in + i, 2 * sizeof *in);
    }
    if (count % 2 == 1) std::memcpy(to + (count - 1) * kPanel * sizeof *in, in + count - 1, 2);
  } else {
    const auto store = portable_kernels()->store[kBFloat16];
    for (size_t i = 0; i < count; ++i) {
      const float x = source.at(from + i);
      store(&x, 1, to + (i / 2 * 2 * kPanel + i % 2) * sizeof(uint16_t));
    }
  }
}

}  // namespace

float Source::at(size_t index) const {
  return dtype == kBFloat16 ? widen(static_cast<const uint16_t*>(data)[index])
                            : static_cast<const float*>(data)[index];
}

void pack_rows(const Linear& linear, const Source& source, int first, int last, int column,
               int interleave, int offset) {
  const size_t k = static_cast<size_t>(linear.k);
  for (int begin = first, end; begin < last; begin = end) {
    const int place = column + begin;
    end = std::min(last, begin + kPanel - place % kPanel);
    const int panel = place / kPanel * interleave + offset;
    char* base = linear.panels + static_cast<size_t>(panel) * panel_bytes(linear.k, linear.dtype);
    for (size_t i = 0; i < k; i += kPackedAtATime) {
      const size_t count = std::min(kPackedAtATime, k - i);
      for (int row = begin; row < end; ++row) {
        pack_run(linear.dtype, source, static_cast<size_t>(row) * k + i, count,
                 base + panel_index(linear.dtype, (column + row) % kPanel, static_cast<int>(i)) *
                            element_bytes(linear.dtype));
      }
    }
  }
}

void unpack_row(const Linear& linear, int row, float* out) {
  const char* base = linear.panel(row / kPanel);
  for (int i = 0; i < linear.k; ++i) {
    const size_t at = panel_index(linear.dtype, row % kPanel, i);
    out[i] = linear.dtype == kBFloat16 ? widen(reinterpret_cast<const uint16_t*>(base)[at])
                                       : reinterpret_cast<const float*>(base)[at];
  }
}

Range share(int count, int part, int parts) {
  const int64_t n = count;
  return {static_cast<int>(n * part / parts), static_cast<int>(n * (part + 1) / parts)};
}

void run_linear(const KernelTable& kernels, const Linear& linear, const void* a, size_t lda, int m,
                float* c, size_t ldc, bool accumulate, TileScratch& scratch, ThreadPool& pool) {
  LinearArgs args{};
  args.a = a;
  args.lda = lda;
  args.m = m;
  args.k = linear.k;
  args.panels = linear.panels;
  args.num_panels = linear.num_panels();
  args.bias = linear.bias;
  args.c = c;
  args.ldc = ldc;
  args.accumulate = accumulate;
  if (kernels.on_tiles && linear.dtype == kBFloat16) {
    run_on_tiles(kernels, args, scratch, pool);
    return;
  }
  const int count = args.num_panels;
  const int least = least_part(count, pool.size(), kLinearPanels, 2);
  for (Range mine; !(mine = pool.take_shrinking(count, least, count)).empty();) {
    const int column = mine.begin * kPanel;
    args.panels = linear.panel(mine.begin);
    args.num_panels = mine.end - mine.begin;
    args.bias = linear.bias ? linear.bias + column : nullptr;
    args.c = c + column;
    kernels.linear[linear.dtype](&args);
  }
}

void run_swiglu(const KernelTable& kernels, const Linear& gate_up, const void* a, size_t lda,
                int m, void* out, size_t ldo, float* tile, TileScratch& scratch,
                ThreadPool& pool) {
  const DType type = kernels.activations[gate_up.dtype];
  const int num_pairs = gate_up.num_panels() / 2;
  LinearArgs args{};
  args.a = a;
  args.lda = lda;
  args.m = m;
  args.k = gate_up.k;
  args.c = tile;
  if (kernels.on_tiles && gate_up.dtype == kBFloat16) into_tiles(args, scratch, pool);
  const int least = least_part(num_pairs, pool.size(), kSwigluPairs / 2, 1);
  for (Range mine; !(mine = pool.take_shrinking(num_pairs, least, kSwigluPairs)).empty();) {
    const int pairs = mine.end - mine.begin;
    args.panels = gate_up.panel(2 * mine.begin);
    args.num_panels = 2 * pairs;
    args.ldc = static_cast<size_t>(pairs) * 2 * kPanel;
    kernels.linear[gate_up.dtype](&args);
    for (int i = 0; i < pairs; ++i) {
      const size_t column = static_cast<size_t>(mine.begin + i) * kPanel;
      kernels.swiglu[type](tile + i * 2 * kPanel, args.ldc, m,
                           static_cast<char*>(out) + column * element_bytes(type), ldo);
    }
  }
}

}  // namespace dualpace
