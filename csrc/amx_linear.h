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

constexpr int kBlockRows = 2 * kTileRows;

// Up to 32 rows every weight is used once, and fetched so many tiles ahead: longer than a memory
// access takes.
constexpr int kAheadSteps = 8;
// Beyond, k is taken in blocks: the weights of two panels stay in a cache while the row blocks pass
// by. Panels are taken in groups, whose sums stay in the second-level cache from one block of k to
// the next. If the activations stay there too, small ones will do; else activations are fetched
// once for each group, a block ahead.
constexpr int kBlockSteps = 32;
constexpr int kGroupPanels = 4;
constexpr size_t kBlockBytes = 256 << 10;  // of activations, in the second case
constexpr int kLeastBlockSteps = 8;
constexpr int kWideGroupPanels = 16;

// What is fetched during a block: in each step, cache lines [first, last) of the 16 that lie at
// `at` and of the 16 that lie `second` bytes behind; a tile further in the next step.
struct Fetch {
  const char* at = nullptr;
  size_t second = 0;
  int first = 0, last = 0;
};

struct TileBlock {
  const char* a;  // first row, at the first step
  TileArgs at;
  const char* w;  // first of two panels (or the only one), at the first step
  size_t panel;   // bytes from one panel to the next
  int steps;
  float* c;
  size_t ldc;  // floats
  int load;    // start from c instead of zero
  Fetch weights;
  int turn;  // from this step on (-1: never) the weights fetched are those at `after`
  const char* after;
  Fetch activations;
  // Sums of two panels that are loaded or stored next and that another thread had last: rows, to be
  // fetched for writing, `sum_pace` in a step.
  float* sums;
  int sum_rows, sum_pace;
};

inline const char* fetch(const char* at, const Fetch& what) {
  const char* const end = at + what.last * 64;
  for (const char* line = at + what.first * 64; line < end; line += 64) {
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + what.second, 0, 2);
  }
  return at + kTileBytes;
}

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
  const char* next_w = b.weights.at;
  const char* next_a = b.activations.at;
  const char* sums = reinterpret_cast<const char*>(b.sums);
  const char* const sums_end = sums + static_cast<size_t>(b.sum_rows) * ldc;
  for (int step = 0; step < b.steps; ++step, a += b.at.step, w += kTileBytes) {
    if (step == b.turn) next_w = b.after;
    next_w = fetch(next_w, b.weights);
    next_a = fetch(next_a, b.activations);
    for (int i = 0; i < b.sum_pace && sums < sums_end; ++i, sums += ldc) {
      T::fetch_to_write(sums);
      T::fetch_to_write(sums + kColumn);
    }
    T::template load<4>(a, b.at.row);
    T::template load<6>(w, kStepBytes);
    T::template multiply<0, 4, 6>();
    if (P > 1) {
      T::template load<7>(w + b.panel, kStepBytes);
      T::template multiply<1, 4, 7>();
    }
    if (R > 1) {
      T::template load<5>(a + b.at.tile, b.at.row);
      T::template multiply<2, 5, 6>();
      if (P > 1) T::template multiply<3, 5, 7>();
    }
  }
  T::template store<0>(c, ldc);
  if (P > 1) T::template store<1>(c + kColumn, ldc);
  if (R > 1) T::template store<2>(c1, ldc);
  if (R > 1 && P > 1) T::template store<3>(c1 + kColumn, ldc);
}

// Where in a call we are: panels of [group, group_end) over steps [first, first + count).
struct Place {
  int group, group_end;
  int first, count;
};

template <class T>
struct TileRun {
  const LinearArgs* args;
  size_t panel;  // bytes
  int load;      // sums start from c
  int configured = 0;

  void configure(int rows) {
    if (rows != configured) T::configure(rows);
    configured = rows;
  }

  // Rows [row, row + 32) x panels [p, p + 2) over the steps of `place`; nothing is fetched yet.
  TileBlock block(int row, int p, const Place& place) const {
    TileBlock b;
    b.at = args->tiles;
    b.a = activations(row, place.first);
    b.w = weights(p, place.first);
    b.panel = panel;
    b.steps = place.count;
    b.c = sums(row, p);
    b.ldc = args->ldc;
    b.load = load || place.first > args->tiles.first;
    b.turn = -1;
    b.after = nullptr;
    b.sums = nullptr;
    b.sum_rows = b.sum_pace = 0;
    return b;
  }

  // Sums at (row, p) come next, if there are two panels of them.
  void fetch_sums(TileBlock* b, int row, int p) const {
    if (p + 1 >= args->num_panels) return;
    b->sums = sums(row, p);
    b->sum_rows = args->m - row < kBlockRows ? args->m - row : kBlockRows;
    b->sum_pace = (kBlockRows + b->steps - 1) / b->steps;
  }

  void compute(const TileBlock& b, int p) const {
    if (configured > kTileRows) {
      if (args->num_panels - p > 1) tile_block<T, 2, 2>(b);
      else tile_block<T, 2, 1>(b);
    } else {
      if (args->num_panels - p > 1) tile_block<T, 1, 2>(b);
      else tile_block<T, 1, 1>(b);
    }
  }

  const char* activations(int row, int step) const {
    return static_cast<const char*>(args->a) + static_cast<size_t>(row / kTileRows) *
           args->tiles.tile + static_cast<size_t>(step) * args->tiles.step;
  }
  const char* weights(int p, int step) const {
    return args->panels + static_cast<size_t>(p) * panel + static_cast<size_t>(step) * kTileBytes;
  }
  float* sums(int row, int p) const {
    return args->c + static_cast<size_t>(row) * args->ldc + p * kPanel;
  }
  size_t to_second(int p) const { return p + 1 < args->num_panels ? panel : 0; }

  // Up to 32 rows: the sums stay in registers, the weights stream by.
  void few_rows() {
    const int begin = args->tiles.first, steps = args->tiles.last - begin;
    const int ahead = steps < kAheadSteps ? steps : kAheadSteps;
    configure(args->m);
    for (int p = 0; p < args->num_panels; p += 2) {
      TileBlock b = block(0, p, {0, args->num_panels, begin, steps});
      b.weights = {weights(p, begin + ahead), panel, 0, kTileRows};
      b.turn = steps - ahead;
      b.after = weights(p + 2, begin);
      fetch_sums(&b, 0, p + 2);
      compute(b, p);
    }
  }

  void many_rows() {
    const int steps = args->tiles.last - args->tiles.first;
    const size_t step_bytes =
        static_cast<size_t>((args->m + kTileRows - 1) / kTileRows) * kTileBytes;
    const bool kept = static_cast<size_t>(steps) * step_bytes <= kKeptBytes;
    const int fit = static_cast<int>(kBlockBytes / step_bytes);
    const int most_steps = kept || fit > kBlockSteps ? kBlockSteps
                           : fit > kLeastBlockSteps  ? fit
                                                     : kLeastBlockSteps;
    const int most_panels = kept ? kGroupPanels : kWideGroupPanels;
    Place place;
    for (place.group = 0; place.group < args->num_panels; place.group = place.group_end) {
      const int left = args->num_panels - place.group;
      place.group_end = place.group + (left < most_panels ? left : most_panels);
      for (place.first = args->tiles.first; place.first < args->tiles.last;
           place.first += place.count) {
        const int rest = args->tiles.last - place.first;
        place.count = rest < most_steps ? rest : most_steps;
        row_blocks(place, !kept);
      }
    }
  }

  // All rows of a place. What comes next is fetched in equal shares: weights in the row blocks of
  // 32, activations (if they have to be) beside each two panels.
  void row_blocks(const Place& place, bool with_activations) {
    const int full = args->m / kBlockRows;
    const int pairs = (place.group_end - place.group + 1) / 2;
    const int end = place.first + place.count;
    const bool last_of_k = end == args->tiles.last;
    const bool last = last_of_k && place.group_end == args->num_panels;
    configure(kBlockRows);
    for (int p = place.group; p < place.group_end; p += 2) {
      // The panels that follow in this group, or in the next block of k, or in the next group.
      int next_p = p + 2, next_step = place.first;
      if (next_p >= place.group_end) {
        next_p = last_of_k ? place.group_end : place.group;
        next_step = last_of_k ? args->tiles.first : end;
      }
      const int pair = (p - place.group) / 2;
      for (int i = 0; i < full; ++i) {
        TileBlock b = block(i * kBlockRows, p, place);
        if (next_p < args->num_panels) {
          b.weights = {weights(next_p, next_step), to_second(next_p), kTileRows * i / full,
                       kTileRows * (i + 1) / full};
        }
        if (with_activations && !last) {
          b.activations = {activations(i * kBlockRows, last_of_k ? args->tiles.first : end),
                           args->tiles.tile, kTileRows * pair / pairs,
                           kTileRows * (pair + 1) / pairs};
        }
        // Within a group, sums have been here since its first block of k.
        if (i + 1 == full && p + 2 >= place.group_end) {
          if (last_of_k) fetch_sums(&b, 0, place.group_end);
        } else if (place.first == args->tiles.first) {
          if (i + 1 < full) fetch_sums(&b, (i + 1) * kBlockRows, p);
          else fetch_sums(&b, 0, p + 2);
        }
        compute(b, p);
      }
    }
    if (args->m % kBlockRows == 0) return;
    configure(args->m % kBlockRows);
    for (int p = place.group; p < place.group_end; p += 2) {
      compute(block(full * kBlockRows, p, place), p);
    }
  }
};

template <class T>
void linear_on_tiles(const LinearArgs* args) {
  if (args->bias) {
    for (int row = 0; row < args->m; ++row) {
      float* c = args->c + static_cast<size_t>(row) * args->ldc;
      for (int i = 0; i < args->num_panels * kPanel; ++i) {
        c[i] = args->bias[i] + (args->accumulate ? c[i] : 0.0f);
      }
    }
  }
  const int all_steps = (args->k + kAlignK - 1) / kAlignK;
  TileRun<T> run{args, static_cast<size_t>(all_steps) * kTileBytes,
                 args->accumulate || args->bias};
  if (args->m <= kBlockRows) run.few_rows();
  else run.many_rows();
  T::release();
}

}  // namespace
}  // namespace dualpace
