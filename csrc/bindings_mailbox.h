// A mailbox as Python holds it; both extension modules know the type.
#pragma once

#include "bindings.h"
#include "mailbox.h"

namespace dualpace {

// Holds the shared memory for as long as it lives.
struct SharedMailbox {
  SharedMailbox(nb::handle buffer, const MailboxLayout& layout, Side side, Patience patience)
      : memory(buffer), box(checked(memory, layout), layout.shape(), side, patience) {}

  Buffer memory;
  Mailbox box;

 private:
  static char* checked(const Buffer& memory, const MailboxLayout& layout) {
    require(memory.size() >= layout.bytes(), "the memory is smaller than the mailbox");
    require(reinterpret_cast<uintptr_t>(memory.data()) % kFlagBytes == 0,
            "a mailbox must lie at a cache line");
    return memory.data();
  }
};

}  // namespace dualpace
