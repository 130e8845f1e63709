// Where everything lies in the memory that the two engines share for GPU Dense Assist.
//
// One function of the model's shape, for both sides: the C++ of the CPU engine, and whatever writes
// the other side's flags (Python over NumPy views, or a device by address). Knows offsets and sizes;
// the order in which they are used is mailbox.h's.
//
// A header, then the slots' flags and staging areas, then the slots' sampling rules. Rules can be
// long and are read by the host only, so they lie behind what a device has to reach.
#pragma once

#include <cstddef>

namespace dualpace {

constexpr int kSlots = 2;
constexpr int kMaxLogprobs = 20;  // likeliest tokens that a row can have reported
constexpr size_t kFlagBytes = 64;  // a flag has a cache line of its own

struct MailboxShape {
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int element_bytes = 0;   // of staged activations: 2 (bfloat16) or 4 (float32)
  int max_rows = 0;        // of a slot
  size_t rules_bytes = 0;  // of a slot

  size_t q_size() const { return static_cast<size_t>(num_heads) * static_cast<size_t>(head_dim); }
  size_t kv_size() const {
    return static_cast<size_t>(num_kv_heads) * static_cast<size_t>(head_dim);
  }
};

// The areas of a slot. R is max_rows; activations have MailboxShape::element_bytes.
enum Area {
  kDescriptor,    // mailbox.h
  kTokens,        // int32 [R], in: each row's last token
  kPositions,     // int64 [R], in: its position
  kTemperatures,  // float64 [R], in: of the draw; 0 is greedy
  kSeeds,         // uint64 [R], in
  kSampled,       // int32 [R], out: each row's next token
  kLogprobs,      // float64 [R * (2 + 2 * kMaxLogprobs)], out, packed as core.logprobs has it
  kAttended,      // [R][heads][head_dim], in: a layer's attention
  kQkv,           // [R][heads + 2 * kv_heads][head_dim], out: rotated queries and keys, and values
  kRules,         // bytes, in: what else the rows ask of the sampler
  kNumAreas
};

class MailboxLayout {
 public:
  // Throws std::invalid_argument for a shape that cannot be.
  explicit MailboxLayout(const MailboxShape& shape);

  const MailboxShape& shape() const { return shape_; }
  size_t bytes() const { return slot_base(0) + kSlots * (slot_bytes_ + rules_stride_); }
  size_t device_bytes() const { return slot_base(0) + kSlots * slot_bytes_; }  // all but the rules

  // Offsets of 32-bit words in the header.
  static constexpr size_t generation() { return 0; }
  static constexpr size_t bell() { return kFlagBytes; }
  static constexpr size_t presence(int side) {
    return (2 + static_cast<size_t>(side)) * kFlagBytes;
  }

  // Offsets of a slot's flags: go of layers 0 … L - 1, done of 0 … L. busy is the slot's owner.
  size_t busy(int slot) const { return slot_base(slot); }
  size_t cancelled(int slot) const { return slot_base(slot) + kFlagBytes; }
  size_t go(int slot, int layer) const {
    return slot_base(slot) + (2 + static_cast<size_t>(layer)) * kFlagBytes;
  }
  size_t done(int slot, int layer) const { return go(slot, shape_.num_layers + layer); }
  size_t flags_bytes() const {  // from go(slot, 0) on
    return (2 * static_cast<size_t>(shape_.num_layers) + 1) * kFlagBytes;
  }

  size_t area(int slot, Area area) const;
  size_t area_bytes(Area area) const { return area_bytes_[area]; }

 private:
  size_t slot_base(int slot) const;

  MailboxShape shape_;
  size_t area_offset_[kNumAreas] = {};  // in the slot; of the rules, 0
  size_t area_bytes_[kNumAreas] = {};
  size_t slot_bytes_ = 0;
  size_t rules_stride_ = 0;
};

}  // namespace dualpace
