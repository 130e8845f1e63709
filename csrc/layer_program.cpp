#include "layer_program.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace dualpace {
namespace {

// x -= the bfloat16 values that it was rounded to.
void subtract_rounded(float* x, const uint16_t* rounded, int n) {
  for (int i = 0; i < n; ++i) {
    x[i] -= std::bit_cast<float>(static_cast<uint32_t>(rounded[i]) << 16);
  }
}

// sum += part, where both are outputs of `linear` and have its bias.
void add_part(const Linear& linear, float* sum, const float* part) {
  for (int i = 0; i < linear.n; ++i) sum[i] += part[i] - (linear.bias ? linear.bias[i] : 0.0f);
}

}  // namespace

void LayerProgram::Rows::resize(int count, size_t row_stride, DType element) {
  stride = row_stride;
  dtype = element;
  const size_t bytes = static_cast<size_t>(count) * row_stride * element_bytes(element);
  values.assign((bytes + sizeof(float) - 1) / sizeof(float), 0.0f);
}

void LayerProgram::reserve(int num_rows, int sampled) {
  const ModelConfig& c = model_.config();
  if (sampled > logits_capacity_) {
    logits_.resize(sampled, output_stride(c.vocab_size));
    logits_capacity_ = sampled;
  }
  if (num_rows <= capacity_) return;
  const auto padded = [](int n) { return static_cast<size_t>(round_up(n, kPanel)); };
  residual_.resize(num_rows, activation_stride(c.hidden_size));
  const DType activation = kernels_.activations[c.dtype];
  // Twice the rows: where activations are bfloat16, queries and keys get them in two parts.
  normed_.resize(2 * num_rows, activation_stride(c.hidden_size), activation);
  qkv_.resize(2 * num_rows, output_stride(c.q_size() + 2 * c.kv_size()));
  attended_.resize(num_rows, activation_stride(c.q_size()), activation);
  hidden_.resize(num_rows, activation_stride(c.intermediate_size), activation);
  cosine_.resize(num_rows, padded(c.head_dim / 2));
  sine_.resize(num_rows, padded(c.head_dim / 2));
  tiles_.resize(static_cast<size_t>(pool_.size()));
  const size_t columns = static_cast<size_t>(num_rows) * kSwigluPairs * 2 * kPanel;
  for (auto& tile : tiles_) tile.resize(std::max(columns, padded(c.hidden_size)));
  scratch_.reserve(kernels_, 2 * num_rows, c.hidden_size, c.vocab_size);
  for (const Linear* linear : {&model_.layer(0).qkv, &model_.layer(0).o, &model_.layer(0).down}) {
    scratch_.reserve(kernels_, num_rows, linear->k, linear->n);
  }
  samplers_.resize(static_cast<size_t>(pool_.size()));
  for (Sampler& sampler : samplers_) sampler.reserve(c.vocab_size);
  capacity_ = num_rows;
}

void LayerProgram::run(const std::vector<DecodeRow>& rows, int sampled, char* arena,
                       int64_t num_pages, int page_tokens, int32_t* next_tokens, float* logits) {
  if (rows.empty()) return;
  const std::lock_guard<std::mutex> lock(turn_);
  check_rows(rows, model_.config().vocab_size, num_pages, page_tokens);
  reserve(static_cast<int>(rows.size()), sampled);
  const ModelConfig& c = model_.config();
  cache_ = {c.num_layers, c.num_kv_heads, page_tokens, c.head_dim, c.dtype};
  cache_rows_.positions.clear();
  cache_rows_.pages.clear();
  for (const DecodeRow& row : rows) {
    cache_rows_.positions.push_back(row.position);
    cache_rows_.pages.push_back(row.pages);
  }
  plan_.build(cache_rows_, {c.group(), c.num_kv_heads, c.head_dim}, page_tokens, pool_.size());
  pool_.run([&](int thread) { iterate(rows, sampled, arena, next_tokens, logits, thread); });
}

void LayerProgram::iterate(const std::vector<DecodeRow>& rows, int sampled, char* arena,
                           int32_t* next_tokens, float* logits, int thread) {
  const ModelConfig& c = model_.config();
  const int m = static_cast<int>(rows.size());
  const int threads = pool_.size();
  // Rows are taken as threads come; one such list between two barriers.
  const auto each_row = [&](int count, const auto& body) {
    for (Range mine; !(mine = pool_.take(count, 1)).empty();) body(mine.begin);
    pool_.barrier();
  };
  float* tile = tiles_[static_cast<size_t>(thread)].data();
  const bool in_parts = normed_.dtype == kBFloat16;
  // Of `count` rows; of the first `both_parts` what is rounded away too, behind all m rows.
  const auto norm = [&](const float* weight, int count, int both_parts) {
    each_row(count, [&](int row) {
      kernels_.rms_norm(residual_.row(row), weight, c.rms_norm_eps, c.hidden_size, tile);
      kernels_.store[normed_.dtype](tile, c.hidden_size, normed_.raw(row));
      if (row < both_parts) {
        const auto* rounded = reinterpret_cast<const uint16_t*>(normed_.raw(row));
        subtract_rounded(tile, rounded, c.hidden_size);
        kernels_.store[kBFloat16](tile, c.hidden_size, normed_.raw(m + row));
      }
    });
  };
  const auto linear = [&](const Linear& weights, Rows& in, Rows& out, bool accumulate,
                          int count) {
    run_linear(kernels_, weights, in.data(), in.stride, count, out.row(0), out.stride, accumulate,
               scratch_, pool_);
    pool_.barrier();
  };

  each_row(m, [&](int row) {
    const DecodeRow& of = rows[static_cast<size_t>(row)];
    model_.embed(of.token, residual_.row(row));
    // The angle is rounded to float before its cosine is taken, as everybody else does.
    for (int i = 0; i < c.head_dim / 2; ++i) {
      const float angle = c.inv_freq[static_cast<size_t>(i)] * static_cast<float>(of.position);
      cosine_.row(row)[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sine_.row(row)[i] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  });

  const AttentionOut attended{attended_.data(), attended_.stride, attended_.dtype};
  for (int index = 0; index < c.num_layers; ++index) {
    const Layer& layer = model_.layer(index);
    // What is rounded on the way into queries and keys moves the softmax of every later layer, more
    // than any other rounding. In two parts it is exact, and the weights are read once all the same.
    // Rows that do not sample go without: a prompt's products would cost a sixth more.
    const int both_parts = in_parts ? sampled : 0;
    norm(layer.input_norm, m, both_parts);
    linear(layer.qkv, normed_, qkv_, false, m + both_parts);
    each_row(m, [&](int row) {
      if (row < both_parts) add_part(layer.qkv, qkv_.row(row), qkv_.row(m + row));
      append_kv(layer, index, arena, row);
    });
    // Behind the last layer's K and V only the rows that sample have a purpose.
    const int live = index + 1 < c.num_layers ? m : sampled;
    if (live == 0) return;
    const AttentionQueries queries{qkv_.row(0), qkv_.stride, kFloat32};
    plan_.attend(kernels_, cache_, arena, index, cache_rows_, queries, {}, attended, thread, pool_);
    pool_.barrier();
    if (plan_.has_splits()) {
      plan_.merge(kernels_, attended, thread, threads);
      pool_.barrier();
    }
    linear(layer.o, attended_, residual_, true, live);
    norm(layer.post_norm, live, 0);
    run_swiglu(kernels_, layer.gate_up, normed_.data(), normed_.stride, live, hidden_.data(),
               hidden_.stride, tile, scratch_, pool_);
    pool_.barrier();
    linear(layer.down, hidden_, residual_, true, live);
  }
  norm(model_.norm(), sampled, 0);
  linear(model_.head(), normed_, logits_, false, sampled);

  each_row(sampled, [&](int row) {
    float* scores = logits_.row(row);
    if (logits) {
      const size_t vocab = static_cast<size_t>(c.vocab_size);
      std::copy(scores, scores + vocab, logits + static_cast<size_t>(row) * vocab);
    }
    next_tokens[row] = samplers_[static_cast<size_t>(thread)].sample(
        scores, c.vocab_size, rows[static_cast<size_t>(row)].sampling);
  });
}

// Normalises and rotates a row's query and key heads, and writes its K and V to their page.
void LayerProgram::append_kv(const Layer& layer, int index, char* arena, int row) {
  const ModelConfig& c = model_.config();
  float* q = qkv_.row(row);
  float* k = q + c.q_size();
  float* v = k + c.kv_size();
  for (int head = 0; head < c.num_heads + c.num_kv_heads; ++head) {
    float* x = q + head * c.head_dim;  // key heads follow the query heads
    const float* weight = head < c.num_heads ? layer.q_norm : layer.k_norm;
    if (weight) kernels_.rms_norm(x, weight, c.rms_norm_eps, c.head_dim, x);
    kernels_.rope(x, cosine_.row(row), sine_.row(row), c.head_dim / 2);
  }
  const int64_t position = cache_rows_.positions[static_cast<size_t>(row)];
  const int32_t* pages = cache_rows_.pages[static_cast<size_t>(row)];
  char* page = arena + static_cast<size_t>(pages[position / cache_.page_tokens]) *
                           cache_.page_bytes();
  const size_t slot = static_cast<size_t>(position % cache_.page_tokens) *
                      static_cast<size_t>(c.head_dim) * element_bytes(cache_.dtype);
  for (int head = 0; head < c.num_kv_heads; ++head) {
    const auto store = kernels_.store[cache_.dtype];
    store(k + head * c.head_dim, c.head_dim, page + cache_.offset(index, 0, head) + slot);
    store(v + head * c.head_dim, c.head_dim, page + cache_.offset(index, 1, head) + slot);
  }
}

}  // namespace dualpace
