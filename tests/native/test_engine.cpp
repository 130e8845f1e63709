// Runs threads, memory and whole iterations without Python, for the sanitizers, like test_kernels.cpp.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "check.h"
#include "layer_program.h"
#include "memory.h"
#include "model.h"
#include "support.h"
#include "thread_pool.h"

using namespace dualpace;

namespace {

// -- threads --------------------------------------------------------------------------------------

void pools_start_and_stop() {
  for (int i = 0; i < 10; ++i) {
    ThreadPool idle(cpus(i % 4 + 1));
    ThreadPool busy(cpus(3));
    std::atomic<int> ran{0};
    busy.run([&](int) { ++ran; });
    CHECK(ran == 3);
  }
}

// Plain integers, handed round at barriers: a barrier that orders too little is a race.
void barriers_order_what_was_written() {
  ThreadPool pool(cpus(3));
  std::vector<int> counts(3, 0);
  for (int run = 0; run < 5; ++run) {
    pool.run([&](int thread) {
      for (int i = 0; i < 100; ++i) {
        const size_t mine = static_cast<size_t>((thread + i) % 3);
        counts[mine] += 1;
        pool.barrier();
      }
    });
  }
  for (const int count : counts) CHECK(count == 500);
}

void parked_threads_wake_up() {
  ThreadPool pool(cpus(3));
  int total = 0;
  for (int run = 0; run < 5; ++run) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4));  // longer than they spin
    pool.run([&](int thread) {
      if (thread == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      pool.barrier();  // where the others sleep by now
      if (thread == run % 3) ++total;
    });
  }
  CHECK(total == 5);
}

void every_item_of_a_shared_list_is_taken_once() {
  ThreadPool pool(cpus(3));
  constexpr int kItems = 1000;
  std::vector<int> taken(kItems);
  pool.run([&](int) {
    for (int list = 1; list <= 50; ++list) {
      const auto take = [&] {
        return list % 2 ? pool.take(kItems, 7) : pool.take_shrinking(kItems, 4, 90);
      };
      for (Range mine; !(mine = take()).empty();) {
        for (int i = mine.begin; i < mine.end; ++i) ++taken[static_cast<size_t>(i)];
      }
      pool.barrier();
    }
  });
  for (const int times : taken) CHECK(times == 50);
}

void callers_take_turns() {
  ThreadPool pool(cpus(2));
  int total = 0;
  const auto call = [&] {
    for (int i = 0; i < 50; ++i) {
      pool.run([&](int thread) {
        if (thread == 1) ++total;
      });
    }
  };
  std::thread other(call);
  call();
  other.join();
  CHECK(total == 100);
}

// -- memory ---------------------------------------------------------------------------------------

void an_arena_is_prepared_while_others_write_to_it() {
  const size_t size = 3 * kHugePage + 12288;
  const int descriptor = memfd_create("test", 0);
  CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(size)) == 0);
  char* arena = map_shared(descriptor, size);
  char* other = map_shared(descriptor, size);
  CHECK(reinterpret_cast<uintptr_t>(arena) % kHugePage == 0);
  std::thread writer([&] {
    for (size_t i = 0; i < size; i += 64) other[i] = static_cast<char>(i / 64 % 100 + 1);
  });
  {
    ThreadPool pool(cpus(3));
    const std::string got = prepare_arena(pool, arena + 4096, size - 4096);
    CHECK(got.find("pages") != std::string::npos);
  }
  writer.join();
  for (size_t i = 0; i < size; i += 64) CHECK(arena[i] == static_cast<char>(i / 64 % 100 + 1));
  unmap_shared(other, size);
  unmap_shared(arena, size);
  close(descriptor);

  Mapping memory(1000);
  CHECK(reinterpret_cast<uintptr_t>(memory.take(100)) % 64 == 0);
  std::memset(memory.take(500), 1, 500);
  CHECK(describe_pages(memory.data(), memory.used()).find("pages") != std::string::npos);
}

// -- all together ---------------------------------------------------------------------------------

void load(Model& model, const ModelConfig& c, ThreadPool& pool) {
  const auto put = [&](const char* name, int layer, std::vector<size_t> shape) {
    size_t count = 1;
    for (const size_t side : shape) count *= side;
    std::vector<float> values = normal(count);
    if (shape.size() == 2) {
      for (float& value : values) value *= 0.2f;
    }
    model.load(name, layer, {values.data(), kFloat32}, shape, pool);
  };
  const size_t hidden = static_cast<size_t>(c.hidden_size);
  const size_t inner = static_cast<size_t>(c.intermediate_size);
  const size_t q = static_cast<size_t>(c.q_size()), kv = static_cast<size_t>(c.kv_size());
  const size_t vocab = static_cast<size_t>(c.vocab_size);
  put("embed_tokens", -1, {vocab, hidden});
  put("lm_head", -1, {vocab, hidden});
  put("norm", -1, {hidden});
  for (int i = 0; i < c.num_layers; ++i) {
    put("input_norm", i, {hidden});
    put("post_norm", i, {hidden});
    put("q_proj", i, {q, hidden});
    put("k_proj", i, {kv, hidden});
    put("v_proj", i, {kv, hidden});
    put("o_proj", i, {hidden, q});
    put("gate_proj", i, {inner, hidden});
    put("up_proj", i, {inner, hidden});
    put("down_proj", i, {hidden, inner});
  }
  CHECK(model.missing().empty());
}

// Decodes some tokens with several threads; with one thread they must be the same.
void iterations_run(const KernelTable& kernels, DType dtype) {
  ModelConfig c;
  c.vocab_size = 200;
  c.hidden_size = 48;
  c.intermediate_size = 100;
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 16;
  c.rms_norm_eps = 1e-5f;
  c.inv_freq.assign(8, 0.1f);
  c.dtype = dtype;
  const int page_tokens = 16, rows = 5, steps = 3;
  const CacheShape shape{c.num_layers, c.num_kv_heads, page_tokens, c.head_dim, c.dtype};
  std::vector<std::vector<int32_t>> results;
  for (const int threads : {1, 3}) {
    generator.seed(3);
    ThreadPool pool(cpus(threads));
    Model model(c);
    load(model, c, pool);
    LayerProgram program(model, pool, kernels);
    std::vector<char> arena(rows * shape.page_bytes());
    std::vector<int32_t> tokens(rows, 1), pages{4, 2, 0, 1, 3}, all;
    for (int step = 0; step < steps; ++step) {
      std::vector<DecodeRow> batch(rows);
      for (size_t i = 0; i < batch.size(); ++i) {
        batch[i].token = tokens[i] + static_cast<int>(i);
        batch[i].token %= c.vocab_size;
        batch[i].position = step;
        batch[i].pages = &pages[i];
        batch[i].num_pages = 1;
      }
      std::vector<float> logits(static_cast<size_t>(rows * c.vocab_size));
      program.run(batch, rows, arena.data(), rows, page_tokens, tokens.data(), logits.data());
      for (const float logit : logits) CHECK(std::isfinite(logit));
      all.insert(all.end(), tokens.begin(), tokens.end());
    }
    results.push_back(all);
  }
  CHECK(results[0] == results[1]);
}

}  // namespace

int main() {
  pools_start_and_stop();
  barriers_order_what_was_written();
  parked_threads_wake_up();
  every_item_of_a_shared_list_is_taken_once();
  callers_take_turns();
  an_arena_is_prepared_while_others_write_to_it();
  for (const KernelTable* kernels : all_kernels()) {
    for (const DType dtype : {kFloat32, kBFloat16}) iterations_run(*kernels, dtype);
  }
  std::printf("all passed\n");
}
