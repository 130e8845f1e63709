// A thread of the GPU engine that sleeps until the CPU engine rings, and passes on what it asks.
//
// Knows requests; what serves them is the callback's. It is on the way of every iteration, so the
// callback should only start the work: launch a graph, or hand the slot to another thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>

#include "mailbox.h"

namespace dualpace {

class Doorbell {
 public:
  using Answer = std::function<void(int slot, const Descriptor& asked)>;

  // `mailbox` is of the GPU's side and lives longer. Each request is passed on once, however often
  // the bell rings for it; one of an older generation is dropped, also what was asked before this
  // side was there.
  Doorbell(Mailbox& mailbox, Answer answer);
  ~Doorbell();  // returns once the thread has ended
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

 private:
  void listen();

  Mailbox& mailbox_;
  Answer answer_;
  std::array<uint32_t, kSlots> seen_{};
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

}  // namespace dualpace
