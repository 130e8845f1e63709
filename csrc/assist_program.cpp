#include "assist_program.h"

#include <algorithm>
#include <stdexcept>


namespace dualpace {
void AssistProgram::check(const std::vector<MicroBatch>& batches, const Mailbox& mailbox,
                          int64_t num_pages, int page_tokens) const {
  const auto require = [](bool ok, const char* rule) {
    if (!ok) throw std::invalid_argument(rule);
  };
  const MailboxLayout& layout = mailbox.layout();
  const MailboxShape& shape = layout.shape();
  const ModelConfig& c = config_;
  require(shape.num_layers == c.num_layers && shape.num_heads == c.num_heads &&
              shape.num_kv_heads == c.num_kv_heads && shape.head_dim == c.head_dim &&
              static_cast<size_t>(shape.element_bytes) == element_bytes(c.dtype),
          "the mailbox is of another model");
  require(!batches.empty() && batches.size() <= kSlots, "one micro-batch per slot of the mailbox");
  for (const MicroBatch& batch : batches) {
    mailbox.check_fits(batch.rows.size(), batch.rules.size());
    check_rows(batch.rows, c.vocab_size, num_pages, page_tokens);
  }
}

Waited AssistProgram::run(const std::vector<MicroBatch>& batches, uint64_t iteration,
                          Mailbox& mailbox, char* arena, int64_t num_pages, int page_tokens,
                          int32_t* next_tokens) {
  const std::lock_guard<std::mutex> lock(turn_);
  check(batches, mailbox, num_pages, page_tokens);
  const ModelConfig& c = config_;
  const int slots = static_cast<int>(batches.size());
  cache_ = {c.num_layers, c.num_kv_heads, page_tokens, c.head_dim, c.dtype};
  outcome_ = mailbox.begin();
  if (outcome_ != Waited::kReady) return outcome_;
  for (int slot = 0; slot < slots; ++slot) {
    submit(slot, batches[static_cast<size_t>(slot)], iteration, page_tokens, mailbox);
  }
  mailbox.ring();
  pool_.run([&](int thread) { iterate(slots, mailbox, arena, thread); });
  for (int slot = 0; slot < slots && outcome_ == Waited::kReady; ++slot) {
    const Waited outcome = mailbox.wait_done(slot, c.num_layers);
    if (outcome != Waited::kReady) give_up(outcome, slots, mailbox);
    const size_t rows = batches[static_cast<size_t>(slot)].rows.size();
    next_tokens = std::copy_n(mailbox.area<int32_t>(slot, kSampled), rows, next_tokens);
  }
  return outcome_;
}

void AssistProgram::submit(int slot, const MicroBatch& batch, uint64_t iteration, int page_tokens,
                           Mailbox& mailbox) {
  Part& part = parts_[static_cast<size_t>(slot)];
  part.rows.positions.clear();
  part.rows.pages.clear();
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    const DecodeRow& row = batch.rows[i];
    part.rows.positions.push_back(row.position);
    part.rows.pages.push_back(row.pages);
    mailbox.area<int32_t>(slot, kTokens)[i] = row.token;
    mailbox.area<int64_t>(slot, kPositions)[i] = row.position;
    mailbox.area<double>(slot, kTemperatures)[i] = row.sampling.temperature;
    mailbox.area<uint64_t>(slot, kSeeds)[i] = row.sampling.seed;
  }
  mailbox.submit(slot, iteration, static_cast<int>(batch.rows.size()), batch.rules);
  part.plan.build(part.rows, {config_.group(), config_.num_kv_heads, config_.head_dim},
                  page_tokens, pool_.size());
}

// Every thread waits for the flags by itself, which is the shortest way to the first row; then they
// agree on how it ended.
void AssistProgram::iterate(int slots, Mailbox& mailbox, char* arena, int thread) {
  const size_t width = static_cast<size_t>(config_.q_size());
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    for (int slot = 0; slot < slots; ++slot) {
      Part& part = parts_[static_cast<size_t>(slot)];
      const Waited waited = mailbox.wait_done(slot, layer);
      if (waited != Waited::kReady) give_up(waited, slots, mailbox);
      pool_.barrier();
      if (outcome_ != Waited::kReady) return;
      // A row's query, then its K and V.
      const char* from = mailbox.area<char>(slot, kQkv);
      const size_t element = element_bytes(config_.dtype);
      const size_t stride = width + 2 * static_cast<size_t>(config_.kv_size());
      const AttentionQueries queries{from, stride, config_.dtype};
      const NewTokens fresh{arena, from + width * element, stride * element};
      const AttentionOut attended{mailbox.area<char>(slot, kAttended), width, config_.dtype};
      part.plan.attend(kernels_, cache_, arena, layer, part.rows, queries, fresh, attended, thread,
                       pool_);
      pool_.barrier();
      if (part.plan.has_splits()) {
        part.plan.merge(kernels_, attended, thread, pool_.size());
        pool_.barrier();
      }
      if (thread == 0) mailbox.post_go(slot, layer);
    }
  }
}

void AssistProgram::give_up(Waited outcome, int slots, Mailbox& mailbox) {
  // The first reason counts: the others follow from it.
  Waited none = Waited::kReady;
  outcome_.compare_exchange_strong(none, outcome);
  for (int slot = 0; slot < slots; ++slot) mailbox.cancel(slot);
}

}  // namespace dualpace
