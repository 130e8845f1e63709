#include "attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear.h"

namespace dualpace {
namespace {

constexpr int64_t kUnitCost = 32;    // what a head costs beyond its tokens, in tokens
// Parts of the work shrink with what is left of it, so that a slow thread holds the others up by
// little at the end: cores differ by several times from one moment to the next.
constexpr int kFirstParts = 2;       // per thread, were all as large as the first
constexpr int kLastParts = 64;       // were all as small as the last
constexpr int kMinSplit = 128;       // about; shorter pieces cost more than they balance
constexpr int64_t kPieces = 16;      // per thread, into which the work can be cut at least

// What AttentionArgs::scratch must hold for any instruction set.
size_t attention_scratch_floats(int group, int head_dim, int kv_heads) {
  const size_t width = static_cast<size_t>(round_up(head_dim, 32));
  const size_t heads = static_cast<size_t>(group);
  // Vectors: queries, sums, scores, running state, and one padded tile of K or V for head sizes that
  // are no multiple of 16.
  const size_t vectors = heads * (2 * width + kTileTokens) +
                         static_cast<size_t>(round_up(2 * group, 16)) + kTileTokens * width;
  // Tiles: queries, sums and running state of blocks of 8 heads; scores of one block; its weights,
  // each four times; and 16 rows of V.
  const size_t padded_heads = static_cast<size_t>(kv_heads * round_up(group, 8));
  const size_t tiles = padded_heads * (2 * width + 2) + 8 * kTileTokens + 8 * 4 * kTileTokens +
                       8 * width;
  return std::max(vectors, tiles);
}

void to_float(const void* from, DType dtype, size_t count, float* to) {
  if (dtype == kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* bits = static_cast<const uint16_t*>(from);
  for (size_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
  }
}

}  // namespace

size_t CacheShape::head_bytes() const {
  return static_cast<size_t>(page_tokens) * static_cast<size_t>(head_dim) * element_bytes(dtype);
}

size_t CacheShape::page_bytes() const {
  return head_bytes() * static_cast<size_t>(num_layers) * 2 * static_cast<size_t>(num_kv_heads);
}

size_t CacheShape::offset(int layer, int which, int kv_head) const {
  const size_t heads = static_cast<size_t>(num_kv_heads);
  return head_bytes() *
         (static_cast<size_t>(layer * 2 + which) * heads + static_cast<size_t>(kv_head));
}

void AttentionPlan::build(const CacheRows& rows, const HeadShape& heads, int page_tokens,
                          int threads) {
  heads_ = heads;
  tasks_.clear();
  merges_.clear();
  bounds_.assign(1, 0);
  num_pieces_ = 0;

  const int num_rows = static_cast<int>(rows.positions.size());
  // Whole pages, so that a new part always has room for a piece: else the loop below would not end.
  const int64_t min_split = round_up(kMinSplit, page_tokens);
  int64_t left = 0, pieces = 0;
  for (const int64_t position : rows.positions) {
    left += (position + 1 + kUnitCost) * heads.num_kv_heads;
    pieces += std::max<int64_t>(1, (position + 1) / (2 * min_split));
  }
  together_ = heads.num_kv_heads;
  const auto enough = [&] {
    return threads == 1 || pieces * (heads.num_kv_heads / together_) >= kPieces * threads;
  };
  while (together_ > 1 && (heads.num_kv_heads % together_ != 0 || !enough())) --together_;

  // Costs are in tokens of one head.
  const int64_t least = std::max((min_split + kUnitCost) * together_,
                                 left / (threads * kLastParts));
  int64_t room = 0;  // of the part that is being filled
  const auto start_part = [&] {
    room = threads == 1 ? left : std::max(least, left / (threads * kFirstParts));
  };
  const auto next_part = [&] {
    bounds_.push_back(tasks_.size());
    start_part();
  };
  start_part();

  for (int row = 0; row < num_rows; ++row) {
    const int64_t length = rows.positions[static_cast<size_t>(row)] + 1;
    for (int head = 0; head < heads.num_kv_heads; head += together_) {
      const int first_piece = num_pieces_;
      bool cut = false;
      for (int64_t begin = 0; begin < length;) {
        int64_t end = length;
        const int64_t tokens = room / together_;
        if (length - begin + kUnitCost > tokens) {
          const int64_t fits = std::max<int64_t>(tokens - kUnitCost, 0) / page_tokens * page_tokens;
          if (fits >= min_split && length - begin - fits >= min_split) {
            end = begin + fits;
          } else if (2 * tokens < length - begin + kUnitCost) {
            next_part();  // better in whole, or cut differently, by the next one
            continue;
          }
        }
        cut = cut || end < length;
        tasks_.push_back({row, head, begin, end, cut ? num_pieces_++ : -1});
        const int64_t cost = (end - begin + kUnitCost) * together_;
        left -= begin == 0 ? cost : cost - kUnitCost * together_;
        room -= cost;
        begin = end;
        if (room <= 0 && left > 0) next_part();
      }
      if (cut) merges_.push_back({row, head, first_piece, num_pieces_ - first_piece});
    }
  }
  if (!tasks_.empty()) bounds_.push_back(tasks_.size());

  partial_.resize(static_cast<size_t>(num_pieces_) *
                  (unit() + 2 * static_cast<size_t>(heads.group * together_)));
  scratch_stride_ =
      round_lines(attention_scratch_floats(heads.group, heads.head_dim, together_)) +
      2 * round_lines(unit());
  scratch_.resize(scratch_stride_ * static_cast<size_t>(threads) + kLine);
  const uintptr_t address = reinterpret_cast<uintptr_t>(scratch_.data());
  scratch_base_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
}

size_t AttentionPlan::unit() const {
  return static_cast<size_t>(together_) * static_cast<size_t>(heads_.group) *
         static_cast<size_t>(heads_.head_dim);
}

void AttentionPlan::attend(const KernelTable& kernels, const CacheShape& shape, const char* arena,
                           int layer, const CacheRows& rows, const AttentionQueries& queries,
                           const NewTokens& fresh, const AttentionOut& out, int thread,
                           ThreadPool& pool) {
  const int parts = static_cast<int>(bounds_.size()) - 1;
  for (Range mine; !(mine = pool.take(parts, 1)).empty();) {
    const size_t first = bounds_[static_cast<size_t>(mine.begin)];
    const size_t last = bounds_[static_cast<size_t>(mine.end)];
    attend_tasks(kernels, shape, arena, layer, rows, queries, fresh, out, thread, first, last);
  }
}

void AttentionPlan::attend_tasks(const KernelTable& kernels, const CacheShape& shape,
                                 const char* arena, int layer, const CacheRows& rows,
                                 const AttentionQueries& queries, const NewTokens& fresh,
                                 const AttentionOut& out, int thread, size_t first, size_t last) {
  const size_t one_head = static_cast<size_t>(heads_.group) * static_cast<size_t>(heads_.head_dim);
  AttentionArgs args;
  args.page_stride = shape.page_bytes();
  args.head_stride = shape.head_bytes();
  args.page_tokens = shape.page_tokens;
  args.head_dim = heads_.head_dim;
  args.group = heads_.group;
  args.scale = 1.0f / std::sqrt(static_cast<float>(heads_.head_dim));
  args.scratch = scratch_base_ + scratch_stride_ * static_cast<size_t>(thread);
  const bool at_once = kernels.heads_together && shape.dtype == kBFloat16 &&
                       heads_.head_dim % 32 == 0 && shape.page_tokens % 16 == 0;
  args.kv_heads = at_once ? together_ : 1;
  const int calls = together_ / args.kv_heads;
  for (size_t i = first; i < last; ++i) {
    const Task& task = tasks_[i];
    const size_t row = static_cast<size_t>(task.row), head = static_cast<size_t>(task.kv_head);
    const size_t at = (row * queries.stride + head * one_head) * element_bytes(queries.dtype);
    const char* from = static_cast<const char*>(queries.base) + at;
    if (queries.dtype == kFloat32) {
      args.query = reinterpret_cast<const float*>(from);
    } else {
      to_float(from, queries.dtype, unit(), query(thread));
      args.query = query(thread);
    }
    if (fresh.arena && task.end > rows.positions[row]) append(shape, layer, rows, fresh, task);
    args.keys = arena + shape.offset(layer, 0, task.kv_head);
    args.values = arena + shape.offset(layer, 1, task.kv_head);
    args.pages = rows.pages[row];
    args.begin = task.begin;
    args.end = task.end;
    args.out = result(thread);
    args.maxima = args.sums = nullptr;
    if (task.piece >= 0) {
      const size_t heads = static_cast<size_t>(together_ * heads_.group);
      args.out = partial_.data() + static_cast<size_t>(task.piece) * (unit() + 2 * heads);
      args.maxima = args.out + unit();
      args.sums = args.maxima + heads;
    }
    for (int call = 0; call < calls; ++call) {
      // What is read after this call: the same tokens of the next head, or the next task's.
      const Task* next = call + 1 < calls ? &task : i + 1 < last ? &tasks_[i + 1] : nullptr;
      args.next_keys = args.next_values = nullptr;
      args.next_pages = nullptr;
      args.next_tokens = 0;
      if (next) {
        const int next_head = next == &task ? task.kv_head + call + 1 : next->kv_head;
        args.next_pages =
            rows.pages[static_cast<size_t>(next->row)] + next->begin / shape.page_tokens;
        args.next_tokens = next->end - next->begin;
        const size_t page = static_cast<size_t>(*args.next_pages) * args.page_stride;
        args.next_keys = arena + page + shape.offset(layer, 0, next_head);
        args.next_values = arena + page + shape.offset(layer, 1, next_head);
      }
      kernels.attention[shape.dtype](&args);
      args.query += one_head;
      args.keys += args.head_stride;
      args.values += args.head_stride;
      args.out += one_head;
      if (args.maxima) {
        args.maxima += heads_.group;
        args.sums += heads_.group;
      }
    }
    if (task.piece < 0) {
      put(kernels, out, task.row, task.kv_head * heads_.group, together_ * heads_.group,
          result(thread));
    }
  }
}

void AttentionPlan::append(const CacheShape& shape, int layer, const CacheRows& rows,
                           const NewTokens& fresh, const Task& task) const {
  const size_t row = static_cast<size_t>(task.row), head = static_cast<size_t>(task.kv_head);
  const size_t bytes = static_cast<size_t>(shape.head_dim) * element_bytes(shape.dtype);
  const int64_t position = rows.positions[row];
  char* page = fresh.arena + static_cast<size_t>(rows.pages[row][position / shape.page_tokens]) *
                                 shape.page_bytes();
  page += static_cast<size_t>(position % shape.page_tokens) * bytes;
  const char* from = fresh.base + row * fresh.stride + head * bytes;
  for (int which = 0; which < 2; ++which) {
    for (int i = 0; i < together_; ++i) {
      std::memcpy(page + shape.offset(layer, which, task.kv_head + i),
                  from + static_cast<size_t>(i) * bytes, bytes);
    }
    from += static_cast<size_t>(shape.num_kv_heads) * bytes;
  }
}

float* AttentionPlan::result(int thread) const {
  return scratch_base_ + scratch_stride_ * static_cast<size_t>(thread + 1) -
         2 * round_lines(unit());
}

void AttentionPlan::put(const KernelTable& kernels, const AttentionOut& out, int row,
                        int query_head, int count, const float* result) const {
  const size_t at = static_cast<size_t>(row) * out.stride +
                    static_cast<size_t>(query_head * heads_.head_dim);
  kernels.store[out.dtype](result, count * heads_.head_dim,
                           static_cast<char*>(out.base) + at * element_bytes(out.dtype));
}

void AttentionPlan::merge(const KernelTable& kernels, const AttentionOut& out, int thread,
                          int threads) {
  const int heads = together_ * heads_.group, dim = heads_.head_dim;
  const size_t stride = unit() + 2 * static_cast<size_t>(heads);
  // A lone long row has few units: threads share their heads.
  const Range mine = share(static_cast<int>(merges_.size()) * heads, thread, threads);
  float* y = result(thread);
  for (int i = mine.begin; i < mine.end; ++i) {
    const Merge& merge = merges_[static_cast<size_t>(i / heads)];
    const int h = i % heads;
    const float* pieces = partial_.data() + static_cast<size_t>(merge.first_piece) * stride;
    float maximum = -INFINITY;
    for (int p = 0; p < merge.num_pieces; ++p) {
      maximum = std::max(maximum, pieces[static_cast<size_t>(p) * stride + unit() + h]);
    }
    std::fill(y, y + dim, 0.0f);
    float total = 0.0f;
    for (int p = 0; p < merge.num_pieces; ++p) {
      const float* piece = pieces + static_cast<size_t>(p) * stride;
      const float weight = std::exp(piece[unit() + h] - maximum);
      total += weight * piece[unit() + heads + h];
      for (int j = 0; j < dim; ++j) y[j] += weight * piece[h * dim + j];
    }
    for (int j = 0; j < dim; ++j) y[j] /= total;
    put(kernels, out, merge.row, merge.kv_head * heads_.group + h, 1, y);
  }
}

}  // namespace dualpace
