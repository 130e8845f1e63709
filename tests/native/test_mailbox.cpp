// Both sides of a mailbox in one process and on one mapping, for the sanitizers: what one side
// writes into an area before it raises a flag is whole for the other one after it. And how waits end
// when the other side does not come to it. Built with -DDUALPACE_SANITIZE, see CMakeLists.txt.
#include <sched.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "assist_program.h"
#include "attention.h"
#include "check.h"
#include "dispatch.h"
#include "doorbell.h"
#include "mailbox.h"
#include "memory.h"
#include "model.h"
#include "thread_pool.h"

using namespace dualpace;

namespace {

constexpr MailboxShape kShape{3, 4, 2, 8, 4, 5, 100};  // three layers, five rows

// Memory and both ends.
struct Pair {
  explicit Pair(Patience patience = {})
      : memory(MailboxLayout(kShape).bytes()),
        base(memory.take(MailboxLayout(kShape).bytes())),
        cpu(base, kShape, kCpuSide, patience),
        gpu(std::make_unique<Mailbox>(base, kShape, kGpuSide, patience)) {}

  Mapping memory;
  char* base;
  Mailbox cpu;
  std::unique_ptr<Mailbox> gpu;
};

void areas_do_not_overlap() {
  const MailboxLayout layout(kShape);
  std::vector<int> uses(layout.bytes(), 0);
  const auto use = [&](size_t offset, size_t bytes) {
    for (size_t i = offset; i < offset + bytes; ++i) ++uses.at(i);
  };
  use(MailboxLayout::generation(), kFlagBytes);
  use(MailboxLayout::bell(), kFlagBytes);
  for (const int side : {kCpuSide, kGpuSide}) use(MailboxLayout::presence(side), kFlagBytes);
  for (int slot = 0; slot < kSlots; ++slot) {
    use(layout.busy(slot), kFlagBytes);
    use(layout.cancelled(slot), kFlagBytes);
    for (int layer = 0; layer < kShape.num_layers; ++layer) use(layout.go(slot, layer), kFlagBytes);
    for (int layer = 0; layer <= kShape.num_layers; ++layer) {
      use(layout.done(slot, layer), kFlagBytes);
    }
    for (int area = 0; area < kNumAreas; ++area) {
      const Area which = static_cast<Area>(area);
      use(layout.area(slot, which), layout.area_bytes(which));
      CHECK(area == kRules || layout.area(slot, which) + layout.area_bytes(which) <=
                                  layout.device_bytes());
    }
  }
  for (const int count : uses) CHECK(count <= 1);
}

// Adds one to what the CPU has attended, layer by layer.
void serve(Mailbox& gpu, int slot, int rows) {
  float* const qkv = gpu.area<float>(slot, kQkv);
  const float* const attended = gpu.area<float>(slot, kAttended);
  qkv[0] = static_cast<float>(gpu.area<int32_t>(slot, kTokens)[rows - 1]);
  gpu.post_done(slot, 0);
  for (int layer = 0; layer < kShape.num_layers; ++layer) {
    if (gpu.wait_go(slot, layer) != Waited::kReady) return gpu.fail(slot);
    qkv[0] = attended[0] + 1.0f;
    if (layer + 1 == kShape.num_layers) {
      gpu.area<int32_t>(slot, kSampled)[0] = static_cast<int32_t>(qkv[0]);
    }
    gpu.post_done(slot, layer + 1);
  }
  gpu.finish(slot);
}

void iterations_hand_everything_over() {
  Pair pair;
  std::array<std::thread, kSlots> servers;
  {
    const Doorbell doorbell(*pair.gpu, [&](int slot, const Descriptor& asked) {
      std::thread& server = servers[static_cast<size_t>(slot)];
      if (server.joinable()) server.join();
      const int rows = static_cast<int>(asked.rows);
      server = std::thread([&pair, slot, rows] { serve(*pair.gpu, slot, rows); });
    });
    for (int iteration = 1; iteration <= 200; ++iteration) {
      const int slots = 1 + iteration % kSlots, rows = 1 + iteration % kShape.max_rows;
      CHECK(pair.cpu.begin() == Waited::kReady);
      for (int slot = 0; slot < slots; ++slot) {
        pair.cpu.area<int32_t>(slot, kTokens)[rows - 1] = iteration + slot;
        pair.cpu.submit(slot, static_cast<uint64_t>(iteration), rows, {});
      }
      pair.cpu.ring();
      if (iteration % 3 == 0) pair.cpu.ring();
      for (int layer = 0; layer < kShape.num_layers; ++layer) {
        for (int slot = 0; slot < slots; ++slot) {
          CHECK(pair.cpu.wait_done(slot, layer) == Waited::kReady);
          pair.cpu.area<float>(slot, kAttended)[0] = pair.cpu.area<float>(slot, kQkv)[0] * 2.0f;
          pair.cpu.post_go(slot, layer);
        }
      }
      for (int slot = 0; slot < slots; ++slot) {
        CHECK(pair.cpu.wait_done(slot, kShape.num_layers) == Waited::kReady);
        CHECK(pair.cpu.area<int32_t>(slot, kSampled)[0] == (iteration + slot) * 8 + 7);
      }
    }
  }
  for (std::thread& server : servers) {
    if (server.joinable()) server.join();
  }
}

// Several threads wait for a flag that does not come; one of them ends it for all.
void waits_end() {
  Pair pair({.total_us = 20'000, .silence_us = 5'000'000});
  const uint32_t before = pair.gpu->generation();
  for (int round = 0; round < 3; ++round) {
    CHECK(pair.cpu.begin() == Waited::kReady);
    pair.cpu.submit(0, 1, 1, {});
    CHECK(pair.gpu->accept(0).rows == 1);
    std::thread waiter([&] { CHECK(pair.cpu.wait_done(0, 0) != Waited::kReady); });
    CHECK(pair.cpu.wait_done(0, 0) != Waited::kReady);
    pair.cpu.cancel(0);
    waiter.join();
    CHECK(pair.cpu.begin() == Waited::kTimedOut);  // nobody has let go of the slot
    CHECK(pair.gpu->wait_go(0, 0) == Waited::kCancelled);
    pair.gpu->fail(0);
  }
  CHECK(pair.gpu->generation() == before + 3);

  CHECK(pair.cpu.begin() == Waited::kReady);
  pair.cpu.submit(0, 1, 1, {});
  pair.gpu.reset();
  CHECK(pair.cpu.wait_done(0, 0) == Waited::kPeerGone);
  pair.gpu = std::make_unique<Mailbox>(pair.base, kShape, kGpuSide);
  CHECK(pair.gpu->accept(0).rows == 0);  // asked of the one before
  CHECK(pair.cpu.begin() == Waited::kReady);
  pair.cpu.submit(0, 1, 1, {});
  CHECK(pair.gpu->accept(0).rows == 1);
}

// -- the assisted iteration -----------------------------------------------------------------------

// Serves one layer after the other, where each query, key and value is a number of its own, and
// compares what is attended to: a row at position 0 sees its own value alone. Stops before `last`.
void serve_numbers(Mailbox& gpu, int slot, int rows, int last) {
  const int heads = kShape.num_heads, kv = kShape.num_kv_heads, dim = kShape.head_dim;
  float* const qkv = gpu.area<float>(slot, kQkv);
  const float* const attended = gpu.area<float>(slot, kAttended);
  const auto number = [&](int layer, int row, int head) {
    return static_cast<float>(1000 * layer + 100 * slot + 10 * row + head);
  };
  for (int layer = 0; layer <= kShape.num_layers; ++layer) {
    if (layer == last) return gpu.fail(slot);
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < heads + 2 * kv; ++head) {
        for (int i = 0; i < dim; ++i) {
          qkv[(row * (heads + 2 * kv) + head) * dim + i] = number(layer, row, head);
        }
      }
      gpu.area<int32_t>(slot, kSampled)[row] = gpu.area<int32_t>(slot, kTokens)[row] + 1;
    }
    gpu.post_done(slot, layer);
    if (layer == kShape.num_layers) break;
    if (gpu.wait_go(slot, layer) != Waited::kReady) return gpu.fail(slot);
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < heads; ++head) {
        const float value = number(layer, row, heads + kv + head / (heads / kv));
        CHECK(attended[(row * heads + head) * dim + dim - 1] == value);
      }
    }
  }
  gpu.finish(slot);
}

void assisted_iterations_attend_to_what_was_computed() {
  ModelConfig c;
  c.vocab_size = 50;
  c.num_layers = kShape.num_layers;
  c.num_heads = kShape.num_heads;
  c.num_kv_heads = kShape.num_kv_heads;
  c.head_dim = kShape.head_dim;
  const int page_tokens = 16, pages = 2 * kShape.max_rows;
  const CacheShape cache{c.num_layers, c.num_kv_heads, page_tokens, c.head_dim, c.dtype};
  std::vector<char> arena(static_cast<size_t>(pages) * cache.page_bytes());
  std::vector<int32_t> ids(static_cast<size_t>(pages));
  std::iota(ids.begin(), ids.end(), 0);
  Pair pair;
  const std::vector<int> cpus(3, sched_getcpu());
  ThreadPool pool(cpus);
  AssistProgram program(c, pool, *select_kernels("auto"));
  std::atomic<int> last{-1};
  std::array<std::thread, kSlots> servers;
  {
    const Doorbell doorbell(*pair.gpu, [&](int slot, const Descriptor& asked) {
      std::thread& server = servers[static_cast<size_t>(slot)];
      if (server.joinable()) server.join();
      const int rows = static_cast<int>(asked.rows), until = last;
      server = std::thread([&pair, slot, rows, until] {
        serve_numbers(*pair.gpu, slot, rows, until);
      });
    });
    for (int iteration = 0; iteration < 24; ++iteration) {
      // Now and then the other side stops at a layer; what comes after that is whole again.
      last = iteration % 4 == 3 ? iteration / 4 % (c.num_layers + 1) : -1;
      std::vector<MicroBatch> batches(static_cast<size_t>(1 + iteration % kSlots));
      int32_t page = 0;
      for (MicroBatch& batch : batches) {
        for (int row = 0; row < 1 + iteration % kShape.max_rows; ++row) {
          batch.rows.push_back({page, 0, &ids[static_cast<size_t>(page)], 1, SamplingRow()});
          ++page;
        }
      }
      std::vector<int32_t> tokens(static_cast<size_t>(page));
      const Waited outcome = program.run(batches, static_cast<uint64_t>(iteration), pair.cpu,
                                         arena.data(), pages, page_tokens, tokens.data());
      CHECK((outcome == Waited::kReady) == (last < 0));
      for (int32_t i = 0; outcome == Waited::kReady && i < page; ++i) {
        CHECK(tokens[static_cast<size_t>(i)] == i + 1);
      }
    }
  }
  for (std::thread& server : servers) {
    if (server.joinable()) server.join();
  }
}

}  // namespace

int main() {
  areas_do_not_overlap();
  iterations_hand_everything_over();
  waits_end();
  assisted_iterations_attend_to_what_was_computed();
  std::printf("all passed\n");
}
