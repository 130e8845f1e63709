// Linear layers on tiles: how activations get there, and how columns and k are shared out.
//
// All activations are needed for every two panels of weights, and with many rows, or long ones,
// they are more than a core's cache has room for beside the weights. So k is cut into parts: all
// columns of a part are computed before those of the next, and a thread reads the activations of a
// part from far away once. Sums wait in c meanwhile, as the floats they are: nothing is rounded.
//
// Knows kernels.h and threads; does not know instruction sets.
#pragma once

#include <atomic>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace dualpace {

// What the threads of a pool share while they compute a layer. Empty without kernels on tiles.
class TileScratch {
 public:
  // Room for layers of up to `n` columns and up to `rows` rows of `k` features, beside what there
  // is room for already. Not during a run of the pool.
  void reserve(const KernelTable& kernels, int rows, int k, int n);

 private:
  friend void into_tiles(LinearArgs& args, TileScratch& scratch, ThreadPool& pool);
  friend void run_on_tiles(const KernelTable& kernels, LinearArgs args, TileScratch& scratch,
                           ThreadPool& pool);

  HugeFloats activations_;              // in tiles of a KiB, those of 16 rows one behind the other
  std::vector<std::atomic<int>> done_;  // parts of k that two panels have; 0 between layers
};

// Makes `args.a`, rows `args.lda` elements apart, ready for a kernel on tiles, over all of k. All
// threads of the pool call it; a barrier passes if there is something to copy.
void into_tiles(LinearArgs& args, TileScratch& scratch, ThreadPool& pool);

// Computes the whole layer that `args` describes; all threads of the pool call it between two
// barriers.
void run_on_tiles(const KernelTable& kernels, LinearArgs args, TileScratch& scratch,
                  ThreadPool& pool);

}  // namespace dualpace
