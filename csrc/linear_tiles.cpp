#include "linear_tiles.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "amx.h"
#include "linear.h"

namespace dualpace {
namespace {

// Up to so many rows are read where they lie. Of more, some sets of the first-level cache would have
// to hold too many lines, and no prefetcher follows lines so far from each other.
constexpr int kRowsInPlace = 16;
constexpr int kCopySteps = 32;  // that a thread takes at a time

constexpr int kUnitPanels = 2;
constexpr int kUnitsPerThread = 24;  // parts of k are cut further until there are so many
constexpr int kLeastSteps = 32;      // of a part of k

int divide_up(int x, int by) { return (x + by - 1) / by; }

int steps_of(int k) { return divide_up(k, kAlignK); }

// Parts of k, so that the activations of each can be kept and the threads end together.
int parts_of(int m, int steps, int units, int threads) {
  const size_t step_bytes = static_cast<size_t>(divide_up(m, kTileRows)) * kTileBytes;
  const int kept_steps = std::max(1, static_cast<int>(kKeptBytes / step_bytes));
  const int even = threads == 1 ? 1 : divide_up(threads * kUnitsPerThread, units);
  return std::clamp(std::max(divide_up(steps, kept_steps), even), 1,
                    std::max(1, steps / kLeastSteps));
}

// Whoever has the part before came earlier, so the wait is short and ends.
void wait_for(const std::atomic<int>& done, int parts) {
  while (done.load(std::memory_order_acquire) != parts) std::this_thread::yield();
}

}  // namespace

void TileScratch::reserve(const KernelTable& kernels, int rows, int k, int n) {
  if (!kernels.on_tiles) return;
  const size_t tiles = static_cast<size_t>(divide_up(rows, kTileRows)) *
                       static_cast<size_t>(steps_of(k));
  if (rows > kRowsInPlace && activations_.size() < tiles * kTileBytes / sizeof(float)) {
    activations_ = HugeFloats(tiles * kTileBytes / sizeof(float));
  }
  const size_t units = static_cast<size_t>(divide_up(n, kUnitPanels * kPanel));
  if (done_.size() < units) done_ = std::vector<std::atomic<int>>(units);
}

void into_tiles(LinearArgs& args, TileScratch& scratch, ThreadPool& pool) {
  const int steps = steps_of(args.k);
  const char* const from = static_cast<const char*>(args.a);
  const size_t stride = args.lda * sizeof(uint16_t);
  args.tiles = {stride, kStepBytes, kTileRows * stride, 0, steps};
  if (args.m <= kRowsInPlace) return;

  const size_t tile = static_cast<size_t>(steps) * kTileBytes;
  char* const to = reinterpret_cast<char*>(scratch.activations_.data());
  const int pieces = divide_up(steps, kCopySteps);
  const int all = divide_up(args.m, kTileRows) * pieces;
  for (Range mine; !(mine = pool.take_shrinking(all, 1, all)).empty();) {
    for (int i = mine.begin; i < mine.end; ++i) {
      const int first_row = i / pieces * kTileRows, rows = std::min(kTileRows, args.m - first_row);
      const int first = i % pieces * kCopySteps, last = std::min(first + kCopySteps, steps);
      for (int row = 0; row < rows; ++row) {
        const char* source = from + static_cast<size_t>(first_row + row) * stride;
        char* target = to + static_cast<size_t>(i / pieces) * tile + row * kStepBytes;
        for (int step = first; step < last; ++step) {
          std::memcpy(target + static_cast<size_t>(step) * kTileBytes,
                      source + static_cast<size_t>(step) * kStepBytes, kStepBytes);
        }
      }
    }
  }
  pool.barrier();
  args.a = to;
  args.tiles = {kStepBytes, kTileBytes, tile, 0, steps};
}

void run_on_tiles(const KernelTable& kernels, LinearArgs args, TileScratch& scratch,
                  ThreadPool& pool) {
  into_tiles(args, scratch, pool);
  const LinearArgs whole = args;
  const int steps = whole.tiles.last;
  const size_t panel = static_cast<size_t>(steps) * kTileBytes;
  const int units = divide_up(whole.num_panels, kUnitPanels);
  const int parts = parts_of(whole.m, steps, units, pool.size());
  // All threads together hold less than a part, or they would wait for each other.
  const int most = std::max(1, units / pool.size());
  for (Range mine; !(mine = pool.take_shrinking(parts * units, 1, most)).empty();) {
    while (!mine.empty()) {
      const int part = mine.begin / units, first = mine.begin % units;
      const int last = std::min(units, first + mine.end - mine.begin);
      const int p = first * kUnitPanels;
      args.num_panels = std::min(last * kUnitPanels, whole.num_panels) - p;
      args.panels = whole.panels + static_cast<size_t>(p) * panel;
      args.c = whole.c + p * kPanel;
      args.bias = whole.bias && part == 0 ? whole.bias + p * kPanel : nullptr;
      args.accumulate = whole.accumulate || part > 0;
      args.tiles.first = share(steps, part, parts).begin;
      args.tiles.last = share(steps, part, parts).end;
      for (int i = first; i < last; ++i) wait_for(scratch.done_[static_cast<size_t>(i)], part);
      kernels.linear[kBFloat16](&args);
      // The last part leaves zeros for the next layer.
      const int next = part + 1 < parts ? part + 1 : 0;
      if (parts > 1) {
        for (int i = first; i < last; ++i) {
          scratch.done_[static_cast<size_t>(i)].store(next, std::memory_order_release);
        }
      }
      mine.begin += last - first;
    }
  }
}

}  // namespace dualpace
