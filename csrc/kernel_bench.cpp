#include "kernel_bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "sampler.h"

namespace dualpace {
namespace {

constexpr size_t kReadBlock = 4096;
constexpr size_t kReadChunk = size_t{2} << 20;  // what a thread takes at a time

// `body(thread)` on all threads, between two barriers.
template <class Body>
double timed(ThreadPool& pool, const Body& body) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point start, stop;
  pool.run([&](int thread) {
    pool.barrier();
    if (thread == 0) start = Clock::now();
    body(thread);
    pool.barrier();
    if (thread == 0) stop = Clock::now();
  });
  return std::chrono::duration<double>(stop - start).count();
}

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Readers of whole blocks. They return something of all they read, or the loads would be dropped.
using Reader = uint64_t (*)(const char* from, size_t blocks);

uint64_t read_words(const char* from, size_t blocks) {
  uint64_t sum[4] = {};
  for (size_t i = 0; i < blocks * kReadBlock; i += sizeof sum) {
    uint64_t words[4];
    std::memcpy(words, from + i, sizeof words);
    for (int j = 0; j < 4; ++j) sum[j] ^= words[j];
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}

#if defined(__x86_64__)
// Target attributes instead of files of their own: these functions are called by pointer only, and
// everything in them is local to this file.
__attribute__((target("avx2"))) uint64_t read_avx2(const char* from, size_t blocks) {
  __m256i sum[4] = {};
  for (size_t i = 0; i < blocks * kReadBlock; i += sizeof sum) {
    for (int j = 0; j < 4; ++j) {
      const void* at = from + i + static_cast<size_t>(j) * sizeof(__m256i);
      sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(static_cast<const __m256i*>(at)));
    }
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]),
                                       _mm256_xor_si256(sum[2], sum[3]));
  uint64_t words[sizeof all / sizeof(uint64_t)];
  std::memcpy(words, &all, sizeof words);
  return words[0];
}

__attribute__((target("avx512f"))) uint64_t read_avx512(const char* from, size_t blocks) {
  __m512i sum[4] = {};
  for (size_t i = 0; i < blocks * kReadBlock; i += sizeof sum) {
    for (int j = 0; j < 4; ++j) {
      const char* at = from + i + static_cast<size_t>(j) * sizeof(__m512i);
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(at));
    }
  }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]),
                                       _mm512_xor_si512(sum[2], sum[3]));
  uint64_t words[sizeof all / sizeof(uint64_t)];
  std::memcpy(words, &all, sizeof words);
  return words[0];
}
#endif

Reader widest_reader() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_words;
}

// The part of `size` bytes that falls to a thread, in whole blocks.
std::pair<size_t, size_t> block_share(size_t size, int thread, int threads) {
  const size_t blocks = size / kReadBlock, t = static_cast<size_t>(thread);
  const size_t n = static_cast<size_t>(threads);
  return {blocks * t / n, blocks * (t + 1) / n};
}

}  // namespace

void fill_bfloat16(ThreadPool& pool, char* base, size_t bytes, bool wide) {
  // Sign, the low bits of the exponent and the mantissa are random.
  const uint64_t random = 0x81FF81FF81FF81FFu;
  const uint64_t exponent = wide ? 0x3E003E003E003E00u : 0x3C003C003C003C00u;
  pool.run([&](int thread) {
    const auto [first, last] = block_share(bytes, thread, pool.size());
    for (size_t i = first * kReadBlock; i < last * kReadBlock; i += sizeof(uint64_t)) {
      const uint64_t word = (mix(i + 1) & random) | exponent;
      std::memcpy(base + i, &word, sizeof word);
    }
  });
}

double time_read(ThreadPool& pool, const char* base, size_t bytes) {
  const Reader reader = widest_reader();
  const int chunks = static_cast<int>((bytes + kReadChunk - 1) / kReadChunk);
  std::atomic<uint64_t> sink{0};
  return timed(pool, [&](int) {
    for (Range mine; !(mine = pool.take(chunks, 1)).empty();) {
      const size_t first = static_cast<size_t>(mine.begin) * kReadChunk;
      sink += reader(base + first, std::min(kReadChunk, bytes - first) / kReadBlock);
    }
  });
}

double time_barrier(ThreadPool& pool, int rounds) {
  return timed(pool, [&](int) {
           for (int i = 0; i < rounds; ++i) pool.barrier();
         }) /
         rounds;
}

double time_sampling(ThreadPool& pool, int rows, int vocab) {
  const size_t width = static_cast<size_t>(vocab);
  std::vector<float> logits(static_cast<size_t>(rows) * width);
  std::vector<Sampler> samplers(static_cast<size_t>(pool.size()));
  std::atomic<int64_t> sink{0};
  pool.run([&](int thread) {
    samplers[static_cast<size_t>(thread)].reserve(vocab);
    const Range mine = share(rows, thread, pool.size());
    for (size_t i = static_cast<size_t>(mine.begin) * width;
         i < static_cast<size_t>(mine.end) * width; ++i) {
      // A sum of four uniform numbers: bell-shaped, standard deviation about 2.3, as logits are.
      const uint64_t bits = mix(i + 1);
      const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) +
                           (bits >> 48);
      logits[i] = static_cast<float>(sum) * 0x1p-14f - 8.0f;
    }
  });
  return timed(pool, [&](int thread) {
    const Range mine = share(rows, thread, pool.size());
    for (int row = mine.begin; row < mine.end; ++row) {
      SamplingRow rules;
      rules.temperature = 0.8;
      rules.top_p = 0.95;
      rules.position = row;
      sink += samplers[static_cast<size_t>(thread)].sample(
          logits.data() + static_cast<size_t>(row) * width, vocab, rules);
    }
  });
}

LinearBench::LinearBench(Engine& engine, int n, int k, bool swiglu)
    : engine_(engine),
      n_(n),
      k_(k),
      swiglu_(swiglu),
      activation_(engine.kernels().activations[kBFloat16]),
      in_stride_(activation_stride(k)),
      out_stride_(swiglu ? activation_stride(n / 2)
                         : output_stride(n)) {}

Linear LinearBench::layer(char* weights) const {
  return {weights, nullptr, n_, k_, kBFloat16};
}

void LinearBench::set_input(const float* x, int m) {
  m_ = m;
  const size_t rows = static_cast<size_t>(m), k = static_cast<size_t>(k_);
  in_.assign(rows * in_stride_, 0.0f);
  out_.assign(rows * out_stride_, 0.0f);
  for (size_t row = 0; row < rows; ++row) {
    engine_.kernels().store[activation_](x + row * k, k_,
                                         reinterpret_cast<char*>(in_.data()) +
                                             row * in_stride_ * element_bytes(activation_));
  }
  scratch_.reserve(engine_.kernels(), m, k_, n_);
  tiles_.assign(static_cast<size_t>(engine_.pool().size()),
                HugeFloats(swiglu_ ? rows * kSwigluPairs * 2 * kPanel : 0));
}

double LinearBench::run(char* weights) {
  const Linear linear = layer(weights);
  const KernelTable& kernels = engine_.kernels();
  return timed(engine_.pool(), [&](int thread) {
    if (swiglu_) {
      run_swiglu(kernels, linear, in_.data(), in_stride_, m_, out_.data(), out_stride_,
                 tiles_[static_cast<size_t>(thread)].data(), scratch_, engine_.pool());
    } else {
      run_linear(kernels, linear, in_.data(), in_stride_, m_, out_.data(), out_stride_, false,
                 scratch_, engine_.pool());
    }
  });
}

void LinearBench::output(float* out) const {
  const Source source{out_.data(), swiglu_ ? activation_ : kFloat32};
  const size_t columns = static_cast<size_t>(outputs());
  for (size_t row = 0; row < static_cast<size_t>(m_); ++row) {
    for (size_t i = 0; i < columns; ++i) {
      out[row * columns + i] = source.at(row * out_stride_ + i);
    }
  }
}

void LinearBench::weight_row(char* weights, int row, float* out) const {
  unpack_row(layer(weights), row, out);
}

AttentionBench::AttentionBench(Engine& engine, const CacheShape& shape, int group, CacheRows rows,
                               const float* query)
    : engine_(engine),
      shape_(shape),
      rows_(std::move(rows)),
      stride_(static_cast<size_t>(shape.num_kv_heads) * static_cast<size_t>(group) *
              static_cast<size_t>(shape.head_dim)) {
  const size_t size = rows_.positions.size() * stride_;
  query_.assign(query, query + size);
  out_.assign(size, 0.0f);
  plan_.build(rows_, {group, shape.num_kv_heads, shape.head_dim}, shape.page_tokens,
              engine.pool().size());
}

double AttentionBench::run(const char* arena, int layer) {
  ThreadPool& pool = engine_.pool();
  const KernelTable& kernels = engine_.kernels();
  const AttentionQueries queries{query_.data(), stride_, kFloat32};
  const AttentionOut out{out_.data(), stride_, kFloat32};
  return timed(pool, [&](int thread) {
    plan_.attend(kernels, shape_, arena, layer, rows_, queries, {}, out, thread, pool);
    if (plan_.has_splits()) {
      pool.barrier();
      plan_.merge(kernels, out, thread, pool.size());
    }
  });
}

}  // namespace dualpace
