#include "doorbell.h"

#include <pthread.h>

#include <utility>

namespace dualpace {

Doorbell::Doorbell(Mailbox& mailbox, Answer answer)
    : mailbox_(mailbox), answer_(std::move(answer)), thread_([this] { listen(); }) {}

Doorbell::~Doorbell() {
  stopped_.store(true);
  mailbox_.ring();
  thread_.join();
}

void Doorbell::listen() {
  pthread_setname_np(pthread_self(), "dualpace-bell");
  // Read before the requests: whoever asks after the look at its slot rings after it, too.
  for (uint32_t bell = mailbox_.bell(); !stopped_.load(); bell = mailbox_.wait_bell(bell)) {
    for (int slot = 0; slot < kSlots; ++slot) {
      uint32_t& seen = seen_[static_cast<size_t>(slot)];
      const uint32_t request = mailbox_.request(slot);
      if (request == seen) continue;
      seen = request;
      const Descriptor asked = mailbox_.accept(slot);
      if (asked.rows > 0) answer_(slot, asked);
    }
  }
}

}  // namespace dualpace
