// Which tokens attention on tiles works on together, and how the next ones are fetched meanwhile.
//
// In an unnamed namespace, because the units that include this are compiled with different flags.
#pragma once

#include "amx.h"

namespace dualpace {
namespace {

// Tokens whose scores are held at once, and how far ahead K and V are fetched.
constexpr int kSpanTokens = 64;
constexpr int kSpanBlocks = kSpanTokens / kTileRows;
static_assert(kSpanTokens <= kTileTokens, "scratch memory is made for kTileTokens");
constexpr int kFetchBytes = 64;    // one line; 128 leaves the other of a pair to the hardware
constexpr int kFetchLocality = 3;  // of __builtin_prefetch: 3 to the first-level cache, 2 to the second

// Tokens of a run that are worked on together: whole blocks of 16 but for the end of the run.
struct Span {
  int count, blocks;
  // Of blocks, in bytes from the K or V of this head in page 0; the last one again up to the end.
  size_t offsets[kSpanBlocks];
};

// The span from token `first` of `pages` on, where `left` tokens remain: as long as those after it.
inline void fill(Span* span, const AttentionArgs* args, const int32_t* pages, int64_t first,
                 int64_t left) {
  const int64_t blocks = (left + kTileRows - 1) / kTileRows;
  const int64_t spans = (blocks + kSpanBlocks - 1) / kSpanBlocks;
  span->blocks = static_cast<int>((blocks + spans - 1) / spans);
  const int64_t tokens = static_cast<int64_t>(span->blocks) * kTileRows;
  span->count = static_cast<int>(tokens < left ? tokens : left);
  const int32_t* page = pages + first / args->page_tokens;
  int slot = static_cast<int>(first % args->page_tokens);
  for (int b = 0; b < span->blocks; ++b) {
    span->offsets[b] = static_cast<size_t>(*page) * args->page_stride +
                       static_cast<size_t>(slot) * static_cast<size_t>(args->head_dim) * 2;
    slot += kTileRows;
    if (slot == args->page_tokens) {
      slot = 0;
      ++page;
    }
  }
  for (int b = span->blocks; b < kSpanBlocks; ++b) span->offsets[b] = span->offsets[b - 1];
}

// Asks for K and then V of the next span, some lines of every block in each step: evenly over all that
// is done with this one, for a core that waits for too many lines at once cannot even read its own
// caches. Blocks lie in several pages, so that their translations start early, and many slow streams
// do not mislead the hardware's prefetcher, which runs on behind the end of what we want.
struct Ahead {
  const char* base;    // of K, then of V
  const char* values;
  const Span* span;
  int end;   // bytes of a block
  int pace;  // lines of a block in a step
  int at = 0;

  inline void step() {
    for (int n = pace; n > 0; --n) {
      if (at == end) {
        if (base == values) return;
        base = values;
        at = 0;
      }
      const char* from = base + at;
#pragma GCC unroll 16
      for (int b = 0; b < kSpanBlocks; ++b) {
        __builtin_prefetch(from + span->offsets[b], 0, kFetchLocality);
      }
      at += kFetchBytes;
    }
  }
};

}  // namespace
}  // namespace dualpace
