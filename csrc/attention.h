// Paged decode attention over a batch: who attends to what, planned once and used in every layer.
//
// Knows pages, rows and heads; does not know layers beyond an offset into a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace dualpace {

// Layout of the KV arena: [page][layer][2][kv_head][page_tokens][head_dim].
struct CacheShape {
  int num_layers = 0;
  int num_kv_heads = 0;
  int page_tokens = 0;
  int head_dim = 0;
  DType dtype = kFloat32;

  size_t head_bytes() const;  // K or V of one head in one page
  size_t page_bytes() const;
  size_t offset(int layer, int which, int kv_head) const;  // which: 0 is K, 1 is V
};

// The rows of one iteration. pages[row] lists the row's pages from position 0 on.
struct CacheRows {
  std::vector<int64_t> positions;      // each row attends to 0 … position
  std::vector<const int32_t*> pages;
};

struct HeadShape {
  int group = 1;  // query heads per KV head
  int num_kv_heads = 1;
  int head_dim = 1;
};

// Rows of [kv_head][group][head_dim], `stride` elements of `dtype` apart.
struct AttentionQueries {
  const void* base = nullptr;
  size_t stride = 0;
  DType dtype = kFloat32;
};

// K and V of every row's last position, which are not in their page of `arena` yet: rows of
// [2][kv_head][head_dim] in the cache's dtype, `stride` bytes apart. Without an arena there are none.
struct NewTokens {
  char* arena = nullptr;
  const char* base = nullptr;
  size_t stride = 0;
};

// Where results go: rows of [kv_head][group][head_dim], `stride` elements of `dtype` apart.
struct AttentionOut {
  void* base = nullptr;
  size_t stride = 0;
  DType dtype = kFloat32;
};

class AttentionPlan {
 public:
  // Shares the batch's work out over parts that shrink as the work does, cutting long contexts at page
  // boundaries, and reserves scratch memory. As many KV heads stay together as leave enough to share.
  void build(const CacheRows& rows, const HeadShape& heads, int page_tokens, int threads);

  bool has_splits() const { return !merges_.empty(); }

  // Attention of one layer, its parts shared among the threads of `pool`, all of which call it
  // between two barriers. Whoever attends to a row's last position writes what is new there first.
  void attend(const KernelTable& kernels, const CacheShape& shape, const char* arena, int layer,
              const CacheRows& rows, const AttentionQueries& queries, const NewTokens& fresh,
              const AttentionOut& out, int thread, ThreadPool& pool);

  // Joins the pieces of cut units; after a barrier, and only needed if has_splits().
  void merge(const KernelTable& kernels, const AttentionOut& out, int thread, int threads);

 private:
  static constexpr size_t kLine = 16;  // floats in a cache line
  static constexpr size_t round_lines(size_t floats) { return (floats + kLine - 1) / kLine * kLine; }

  // A unit is a row and `together_` of its KV heads, from `kv_head` on.
  struct Task {
    int row, kv_head;
    int64_t begin, end;
    int piece;  // place among the partial results, or -1 for a whole unit
  };
  // Tasks [first, last), whose K and V are fetched one task ahead.
  void attend_tasks(const KernelTable& kernels, const CacheShape& shape, const char* arena,
                    int layer, const CacheRows& rows, const AttentionQueries& queries,
                    const NewTokens& fresh, const AttentionOut& out, int thread, size_t first,
                    size_t last);

  // A unit's new K and V, to their place.
  void append(const CacheShape& shape, int layer, const CacheRows& rows, const NewTokens& fresh,
              const Task& task) const;

  // This thread's memory behind the kernels' scratch: the result of one unit, on its way to
  // AttentionOut, and the queries of one.
  float* result(int thread) const;
  float* query(int thread) const { return result(thread) + round_lines(unit()); }
  // Results of `count` query heads from `query_head` on.
  void put(const KernelTable& kernels, const AttentionOut& out, int row, int query_head, int count,
           const float* result) const;

  struct Merge {
    int row, kv_head;
    int first_piece, num_pieces;
  };

  size_t unit() const;  // query heads of a unit times head_dim

  HeadShape heads_;
  int together_ = 1;
  std::vector<Task> tasks_;
  std::vector<size_t> bounds_;  // part p has tasks bounds_[p] … bounds_[p + 1] - 1
  std::vector<Merge> merges_;
  int num_pieces_ = 0;
  std::vector<float> partial_;  // [piece]: weighted sums of a unit, maxima, denominators
  std::vector<float> scratch_;
  size_t scratch_stride_ = 0;  // floats per thread
  float* scratch_base_ = nullptr;
};

}  // namespace dualpace
