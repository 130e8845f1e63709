#include "mailbox_layout.h"

#include <cstdint>
#include <stdexcept>

namespace dualpace {
namespace {

constexpr size_t kPage = 4096;

size_t round_to(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

MailboxLayout::MailboxLayout(const MailboxShape& shape) : shape_(shape) {
  if (shape.num_layers < 1 || shape.num_heads < 1 || shape.num_kv_heads < 1 ||
      shape.head_dim < 1 || shape.max_rows < 1 ||
      (shape.element_bytes != 2 && shape.element_bytes != 4)) {
    throw std::invalid_argument("a mailbox needs positive dimensions and elements of 2 or 4 bytes");
  }
  const size_t rows = static_cast<size_t>(shape.max_rows);
  const size_t element = static_cast<size_t>(shape.element_bytes);
  area_bytes_[kDescriptor] = kFlagBytes;
  area_bytes_[kTokens] = area_bytes_[kSampled] = rows * sizeof(int32_t);
  area_bytes_[kPositions] = rows * sizeof(int64_t);
  area_bytes_[kTemperatures] = rows * sizeof(double);
  area_bytes_[kSeeds] = rows * sizeof(uint64_t);
  area_bytes_[kLogprobs] = rows * (2 + 2 * kMaxLogprobs) * sizeof(double);
  area_bytes_[kAttended] = rows * shape.q_size() * element;
  area_bytes_[kQkv] = rows * (shape.q_size() + 2 * shape.kv_size()) * element;
  area_bytes_[kRules] = shape.rules_bytes;
  size_t offset = 2 * kFlagBytes + flags_bytes();
  for (int area = 0; area < kRules; ++area) {
    area_offset_[area] = offset;
    offset += round_to(area_bytes_[area], kFlagBytes);
  }
  slot_bytes_ = round_to(offset, kPage);
  rules_stride_ = round_to(shape.rules_bytes, kPage);
}

size_t MailboxLayout::slot_base(int slot) const {
  return kPage + static_cast<size_t>(slot) * slot_bytes_;
}

size_t MailboxLayout::area(int slot, Area area) const {
  if (area == kRules) return device_bytes() + static_cast<size_t>(slot) * rules_stride_;
  return slot_base(slot) + area_offset_[area];
}

}  // namespace dualpace
