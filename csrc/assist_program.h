// One iteration whose dense part the GPU engine computes: here KV is appended and attended to.
//
// The twin of layer_program.h for GPU Dense Assist. Needs a model's shape but none of its weights;
// everything between two attentions comes through the mailbox, whose protocol mailbox.h tells.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "attention.h"
#include "decode_row.h"
#include "mailbox.h"
#include "model.h"
#include "thread_pool.h"

namespace dualpace {

// Rows of one slot, and what they ask of the sampler as bytes that only the other side reads.
struct MicroBatch {
  std::vector<DecodeRow> rows;
  std::span<const char> rules;
};

class AssistProgram {
 public:
  AssistProgram(const ModelConfig& config, ThreadPool& pool, const KernelTable& kernels)
      : config_(config), pool_(pool), kernels_(kernels) {}

  // Runs up to kSlots micro-batches at a time, each in a slot: while one is attended to, the other
  // side computes the other. Writes each row's next token, batch after batch. If the outcome is not
  // kReady nothing counts, whatever has been written to the rows' pages at their positions. Throws
  // std::invalid_argument, before anything is touched, for what is out of range or does not fit.
  // Concurrent callers take turns.
  Waited run(const std::vector<MicroBatch>& batches, uint64_t iteration, Mailbox& mailbox,
             char* arena, int64_t num_pages, int page_tokens, int32_t* next_tokens);

 private:
  struct Part {
    CacheRows rows;
    AttentionPlan plan;
  };

  void check(const std::vector<MicroBatch>& batches, const Mailbox& mailbox, int64_t num_pages,
             int page_tokens) const;
  void submit(int slot, const MicroBatch& batch, uint64_t iteration, int page_tokens,
              Mailbox& mailbox);
  void iterate(int slots, Mailbox& mailbox, char* arena, int thread);
  void give_up(Waited outcome, int slots, Mailbox& mailbox);

  const ModelConfig& config_;
  ThreadPool& pool_;
  const KernelTable& kernels_;
  std::mutex turn_;

  CacheShape cache_;
  std::array<Part, kSlots> parts_;
  std::atomic<Waited> outcome_{Waited::kReady};
};

}  // namespace dualpace
