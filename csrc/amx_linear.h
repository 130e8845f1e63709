// The bfloat16 linear layer on tiles: loops and blocking, over any tile unit.
//
// Everything is in an unnamed namespace and no C++ library header is included: the units that include
// this are compiled with different flags.
//
// Registers: 0 … 3 sums (row block x panel), 4 and 5 activations, 6 and 7 weights.
#pragma once

#include "amx.h"

namespace dualpace {
namespace {

// A step is 32 values of k: one row of an activation tile, and one tile of weights of 16 columns.
constexpr int kStepBytes = kAlignK * 2;
static_assert(kStepBytes == kTileRowBytes, "steps are tiles");

// Up to 32 rows every weight is used once, and fetched so many tiles ahead: longer than a memory
// access takes.
constexpr int kAheadSteps = 8;
// Beyond, panels are taken in groups and k in blocks: the weights of a block stay in the
// second-level cache while the row blocks pass by, and so do 32 rows of activations while the panels
// of the group pass by. Small enough for two threads that share a core's caches; measured beside 8,
// 16 and 128 steps and groups of 8 and 16, which differ by little.
constexpr int kGroupPanels = 4;
constexpr int kBlockSteps = 32;

struct TileBlock {
  const char* a;  // first row, at the k of the block
  size_t lda;     // bytes
  int rows;       // 1 … 32
  const char* w;  // first of two panels (or the only one), at the k of the block
  size_t panel;   // bytes from one panel to the next
  int steps;
  float* c;
  size_t ldc;  // floats
  int load;    // start from c instead of zero
  // What is fetched meanwhile: in each step cache lines [first_line, last_line) of the 16 + 16 that
  // lie at `next` and, for the second panel, `panel` behind it; a tile further in the next step.
  const char* next;
  int first_line, last_line;
  int turn;  // from this step on (-1: never) the lines are those at `after`
  const char* after;
};

// Sums of R row tiles x P panels over the steps of a block.
template <class T, int R, int P>
inline void tile_block(const TileBlock& b) {
  const size_t ldc = b.ldc * sizeof(float);
  char* c = reinterpret_cast<char*>(b.c);
  char* c1 = c + kTileRows * ldc;
  constexpr size_t kColumn = kPanel * sizeof(float);
  if (b.load) {
    T::template load<0>(c, ldc);
    if (P > 1) T::template load<1>(c + kColumn, ldc);
    if (R > 1) T::template load<2>(c1, ldc);
    if (R > 1 && P > 1) T::template load<3>(c1 + kColumn, ldc);
  } else {
    T::template zero<0>();
    if (P > 1) T::template zero<1>();
    if (R > 1) T::template zero<2>();
    if (R > 1 && P > 1) T::template zero<3>();
  }
  const char* a = b.a;
  const char* w = b.w;
  const char* next = b.next;
  for (int step = 0; step < b.steps; ++step, a += kStepBytes, w += kTileBytes) {
    if (step == b.turn) next = b.after;
    for (int line = b.first_line; line < b.last_line; ++line) {
      const int of_panel = line % kTileRows;
      __builtin_prefetch(next + (line < kTileRows ? 0 : b.panel) + of_panel * 64, 0, 2);
    }
    next += kTileBytes;
    T::template load<4>(a, b.lda);
    T::template load<6>(w, kStepBytes);
    T::template multiply<0, 4, 6>();
    if (P > 1) {
      T::template load<7>(w + b.panel, kStepBytes);
      T::template multiply<1, 4, 7>();
    }
    if (R > 1) {
      T::template load<5>(a + kTileRows * b.lda, b.lda);
      T::template multiply<2, 5, 6>();
      if (P > 1) T::template multiply<3, 5, 7>();
    }
  }
  T::template store<0>(c, ldc);
  if (P > 1) T::template store<1>(c + kColumn, ldc);
  if (R > 1) T::template store<2>(c1, ldc);
  if (R > 1 && P > 1) T::template store<3>(c1 + kColumn, ldc);
}

template <class T>
inline void tile_block(const TileBlock& b, int panels) {
  if (b.rows > kTileRows) {
    if (panels > 1) tile_block<T, 2, 2>(b);
    else tile_block<T, 2, 1>(b);
  } else {
    if (panels > 1) tile_block<T, 1, 2>(b);
    else tile_block<T, 1, 1>(b);
  }
}

template <class T>
struct TileRun {
  const LinearArgs* args;
  size_t panel;  // bytes
  int load;      // sums start from c
  int configured = 0;

  // Rows [row, row + 32) x panels [p, p + 2) over steps [first, first + count).
  void block(int row, int p, int first, int count, const char* next, int first_line, int last_line,
             int turn = -1, const char* after = nullptr) {
    const int rows = args->m - row > 2 * kTileRows ? 2 * kTileRows : args->m - row;
    if (rows != configured) {
      T::configure(rows);
      configured = rows;
    }
    TileBlock b;
    b.lda = args->lda * 2;
    b.a = static_cast<const char*>(args->a) + row * b.lda + static_cast<size_t>(first) * kStepBytes;
    b.rows = rows;
    b.w = weights(p, first);
    b.panel = panel;
    b.steps = count;
    b.c = args->c + row * args->ldc + p * kPanel;
    b.ldc = args->ldc;
    b.load = load || first > 0;
    b.next = next;
    b.first_line = first_line;
    b.last_line = last_line;
    b.turn = turn;
    b.after = after;
    tile_block<T>(b, args->num_panels - p);
  }

  const char* weights(int p, int step) const {
    return args->panels + p * panel + static_cast<size_t>(step) * kTileBytes;
  }
};

template <class T>
void linear_on_tiles(const LinearArgs* args) {
  const int m = args->m;
  const int num_panels = args->num_panels;
  if (args->bias) {
    for (int row = 0; row < m; ++row) {
      float* c = args->c + row * args->ldc;
      for (int i = 0; i < num_panels * kPanel; ++i) {
        c[i] = args->bias[i] + (args->accumulate ? c[i] : 0.0f);
      }
    }
  }
  const int steps = (args->k + kAlignK - 1) / kAlignK;
  TileRun<T> run{args, static_cast<size_t>(steps) * kTileBytes, args->accumulate || args->bias};
  const int row_blocks = (m + 2 * kTileRows - 1) / (2 * kTileRows);
  if (row_blocks == 1) {
    const int ahead = steps < kAheadSteps ? steps : kAheadSteps;
    for (int p = 0; p < num_panels; p += 2) {
      run.block(0, p, 0, steps, run.weights(p, ahead), 0, 2 * kTileRows, steps - ahead,
                run.weights(p + 2, 0));
    }
  } else {
    for (int group = 0; group < num_panels; group += kGroupPanels) {
      const int end = group + kGroupPanels > num_panels ? num_panels : group + kGroupPanels;
      for (int first = 0; first < steps; first += kBlockSteps) {
        const int count = steps - first < kBlockSteps ? steps - first : kBlockSteps;
        for (int i = 0; i < row_blocks; ++i) {
          const int first_line = 2 * kTileRows * i / row_blocks;
          const int last_line = 2 * kTileRows * (i + 1) / row_blocks;
          for (int p = group; p < end; p += 2) {
            const char* next = first + count < steps ? run.weights(p, first + count)
                                                     : run.weights(p + kGroupPanels, 0);
            run.block(i * 2 * kTileRows, p, first, count, next, first_line, last_line);
          }
        }
      }
    }
  }
  T::release();
}

}  // namespace
}  // namespace dualpace
