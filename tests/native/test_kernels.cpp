// Runs every kernel without Python, for the sanitizers: reads past an end, races, undefined behaviour.
// What the numbers must be is pinned by tests/cpu; here they only have to be plausible, so that a
// broken kernel does not go unnoticed. Built with -DDUALPACE_SANITIZE, see CMakeLists.txt.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "check.h"
#include "linear.h"
#include "sampler.h"
#include "support.h"
#include "thread_pool.h"

using namespace dualpace;

namespace {

void attention_is_whole_after_a_split(const KernelTable& kernels, DType dtype, int dim,
                                      const std::vector<int64_t>& lengths, int threads) {
  const int group = 5, kv_heads = 2, page_tokens = 16;
  const CacheShape shape{2, kv_heads, page_tokens, dim, dtype};
  std::vector<std::vector<int32_t>> tables;
  int32_t pages = 0;
  for (const int64_t length : lengths) {
    tables.emplace_back();
    for (int64_t t = 0; t < length; t += page_tokens) tables.back().push_back(pages++);
  }
  // As long as the pages, not a byte more: a kernel may not read past the arena.
  std::vector<char> arena(static_cast<size_t>(pages) * shape.page_bytes());
  const size_t count = arena.size() / element_bytes(dtype);
  portable_kernels()->store[dtype](normal(count).data(), static_cast<int>(count), arena.data());
  CacheRows rows;
  for (size_t i = 0; i < lengths.size(); ++i) {
    rows.positions.push_back(lengths[i] - 1);
    rows.pages.push_back(tables[i].data());
  }
  // What is at the last position comes with the queries; until it is appended, that is poison.
  const size_t element = element_bytes(dtype), head_bytes = static_cast<size_t>(dim) * element;
  std::vector<char> fresh(lengths.size() * 2 * kv_heads * head_bytes);
  char* kept = fresh.data();
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t last = lengths[i] - 1;
    char* page = arena.data() + static_cast<size_t>(tables[i].back()) * shape.page_bytes() +
                 static_cast<size_t>(last % page_tokens) * head_bytes;
    for (int part = 0; part < 2 * kv_heads; ++part, kept += head_bytes) {
      char* at = page + shape.offset(1, part / kv_heads, part % kv_heads);
      std::memcpy(kept, at, head_bytes);
      std::memset(at, 0xff, head_bytes);
    }
  }
  const size_t stride = static_cast<size_t>(kv_heads * group * dim);
  std::vector<char> query(lengths.size() * stride * element);
  portable_kernels()->store[dtype](normal(lengths.size() * stride).data(),
                                   static_cast<int>(lengths.size() * stride), query.data());
  std::vector<float> out(lengths.size() * stride);

  ThreadPool pool(cpus(threads));
  AttentionPlan plan;
  plan.build(rows, {group, kv_heads, dim}, page_tokens, threads);
  CHECK(plan.has_splits());
  const AttentionQueries queries{query.data(), stride, dtype};
  const NewTokens last{arena.data(), fresh.data(), 2 * kv_heads * head_bytes};
  const AttentionOut to{out.data(), stride, kFloat32};
  pool.run([&](int thread) {
    plan.attend(kernels, shape, arena.data(), 1, rows, queries, last, to, thread, pool);
    pool.barrier();
    plan.merge(kernels, to, thread, threads);
  });

  for (size_t row = 0; row < lengths.size(); ++row) {
    for (int head = 0; head < kv_heads * group; ++head) {
      const size_t first = (row * stride + static_cast<size_t>(head * dim)) * element;
      const Source q{query.data() + first, dtype};
      std::vector<double> want(static_cast<size_t>(dim));
      double total = 0.0;
      for (int64_t t = 0; t < lengths[row]; ++t) {
        const auto at = [&](int which, int i) {
          const size_t page = static_cast<size_t>(tables[row][t / page_tokens]);
          const Source source{arena.data() + page * shape.page_bytes() +
                                  shape.offset(1, which, head / group),
                              dtype};
          return static_cast<double>(source.at(static_cast<size_t>(t % page_tokens * dim + i)));
        };
        double score = 0.0;
        for (int i = 0; i < dim; ++i) score += q.at(static_cast<size_t>(i)) * at(0, i);
        const double weight = std::exp(score / std::sqrt(dim));
        total += weight;
        for (int i = 0; i < dim; ++i) want[static_cast<size_t>(i)] += weight * at(1, i);
      }
      for (double& value : want) value /= total;
      CHECK(relative_l2(out.data() + row * stride + head * dim, want) < 1e-2);
    }
  }
}

// W in memory that ends with it.
struct Weights {
  Weights(int n, int k, DType dtype, int interleave) : bytes(packed_bytes(n, k, dtype)) {
    linear.n = n;
    linear.k = k;
    linear.dtype = dtype;
    linear.panels = bytes.data();
    values = normal(static_cast<size_t>(n) * static_cast<size_t>(k));
    const int part = n / interleave;
    for (int i = 0; i < interleave; ++i) {
      const size_t first = static_cast<size_t>(i * part) * static_cast<size_t>(k);
      pack_rows(linear, {values.data() + first, kFloat32}, 0, part, 0, interleave, i);
    }
  }

  // x · row `row` of W as it was packed.
  double dot(const float* x, int row) const {
    double sum = 0.0;
    for (int i = 0; i < linear.k; ++i) {
      sum += static_cast<double>(x[i]) * values[static_cast<size_t>(row * linear.k + i)];
    }
    return sum;
  }

  std::vector<char> bytes;
  std::vector<float> values;
  Linear linear;
};

void linear_layers_are_right(const KernelTable& kernels, DType dtype, int k,
                             const std::vector<int>& row_counts) {
  ThreadPool pool(cpus(3));
  const DType type = kernels.activations[dtype];
  const size_t in_stride = activation_stride(k);
  for (const int n : {16, 33, 144}) {
    const Weights plain(n, k, dtype, 1);
    const size_t columns = static_cast<size_t>(round_up(n, kPanel));
    TileScratch scratch;
    scratch.reserve(kernels, row_counts.back(), k, n);
    for (const int m : row_counts) {
      const size_t rows = static_cast<size_t>(m);
      const std::vector<float> x = normal(rows * static_cast<size_t>(k));
      std::vector<float> a(rows * in_stride), c(rows * columns);
      for (size_t row = 0; row < rows; ++row) {
        kernels.store[type](x.data() + row * static_cast<size_t>(k), k,
                            reinterpret_cast<char*>(a.data()) +
                                row * in_stride * element_bytes(type));
      }
      pool.run([&](int) {
        run_linear(kernels, plain.linear, a.data(), in_stride, m, c.data(), columns, false, scratch,
                   pool);
      });
      for (size_t row = 0; row < rows; ++row) {
        std::vector<double> want;
        for (int j = 0; j < n; ++j) {
          want.push_back(plain.dot(x.data() + row * static_cast<size_t>(k), j));
        }
        CHECK(relative_l2(c.data() + row * columns, want) < 2e-2);
      }
    }
  }
}

void gate_and_up_meet_in_swiglu(const KernelTable& kernels, DType dtype) {
  ThreadPool pool(cpus(3));
  const DType type = kernels.activations[dtype];
  const int k = 70, inner = 80, m = 33;
  const size_t in_stride = activation_stride(k);
  const Weights gate_up(2 * inner, k, dtype, 2);
  const std::vector<float> x = normal(static_cast<size_t>(m * k));
  const size_t out_stride = activation_stride(inner);
  std::vector<float> a(static_cast<size_t>(m) * in_stride);
  std::vector<float> out(static_cast<size_t>(m) * out_stride);
  std::vector<std::vector<float>> tiles(
      3, std::vector<float>(static_cast<size_t>(m) * kSwigluPairs * 2 * kPanel));
  for (int row = 0; row < m; ++row) {
    kernels.store[type](x.data() + row * k, k,
                        reinterpret_cast<char*>(a.data()) +
                            static_cast<size_t>(row) * in_stride * element_bytes(type));
  }
  TileScratch scratch;
  scratch.reserve(kernels, m, k, 2 * inner);
  pool.run([&](int thread) {
    run_swiglu(kernels, gate_up.linear, a.data(), in_stride, m, out.data(), out_stride,
               tiles[static_cast<size_t>(thread)].data(), scratch, pool);
  });
  const Source result{out.data(), type};
  for (int row = 0; row < m; ++row) {
    std::vector<float> got;
    std::vector<double> want;
    for (int j = 0; j < inner; ++j) {
      const double gate = gate_up.dot(x.data() + row * k, j);
      want.push_back(gate / (1.0 + std::exp(-gate)) * gate_up.dot(x.data() + row * k, inner + j));
      got.push_back(result.at(static_cast<size_t>(row) * out_stride + static_cast<size_t>(j)));
    }
    CHECK(relative_l2(got.data(), want) < 3e-2);
  }
}

void sampled_ids_are_valid() {
  const int vocab = 1000;
  Sampler sampler;
  sampler.reserve(vocab);
  const std::vector<float> logits = normal(vocab);
  const std::vector<int32_t> banned{0, 7, 999}, biased{7, 8}, seen{0, 7, 500, 999};
  const std::vector<double> biases{50.0, -50.0};
  const std::vector<int32_t> counts{0, 3, 1, 0};
  for (int i = 0; i < 200; ++i) {
    SamplingRow rules;
    rules.temperature = i % 5 * 0.4;
    rules.top_k = i % 3 * 20;
    rules.top_p = i % 2 ? 0.9 : 1.0;
    rules.min_p = i % 7 == 0 ? 0.05 : 0.0;
    rules.seed = std::numeric_limits<uint64_t>::max() - static_cast<uint64_t>(i);
    rules.position = i;
    rules.banned = banned;
    if (i % 4 == 0) {
      rules.biased = biased;
      rules.biases = biases;
      rules.seen = seen;
      rules.seen_counts = counts;
      rules.repetition_penalty = 1.5;
      rules.presence_penalty = -2.0;
      rules.frequency_penalty = 0.5;
    }
    std::vector<double> logprobs(2 + 2 * static_cast<size_t>(i % 6));
    if (i % 3 == 0) {
      rules.logprobs = logprobs.data();
      rules.num_top = i % 6;
    }
    std::vector<float> scores = logits;
    if (i % 11 == 0) scores[static_cast<size_t>(i)] = std::numeric_limits<float>::quiet_NaN();
    if (i % 50 == 49) scores.assign(vocab, -std::numeric_limits<float>::infinity());
    const std::vector<float> again = scores;
    const int32_t token = sampler.sample(scores.data(), vocab, rules);
    CHECK(token >= 0 && token < vocab);
    scores = again;
    CHECK(sampler.sample(scores.data(), vocab, rules) == token);
  }
}

}  // namespace

int main() {
  for (const KernelTable* kernels : all_kernels()) {
    std::printf("%s\n", kernels->name);
    for (const DType dtype : {kFloat32, kBFloat16}) {
      for (const int head_dim : {48, 64}) {  // the second one fits into tiles
        attention_is_whole_after_a_split(*kernels, dtype, head_dim, {1, 700, 16, 33, 129}, 4);
      }
      if (dtype == kBFloat16) {  // long enough for both heads to stay together
        attention_is_whole_after_a_split(*kernels, dtype, 64, {5000, 3400}, 2);
      }
      linear_layers_are_right(*kernels, dtype, 70,
                              {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 65});
      linear_layers_are_right(*kernels, dtype, 2100, {1, 33});  // k in parts, on tiles
      gate_and_up_meet_in_swiglu(*kernels, dtype);
    }
  }
  sampled_ids_are_valid();
  std::printf("all passed\n");
}
