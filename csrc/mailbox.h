// How the two engines take turns in the shared memory of GPU Dense Assist.
//
// The CPU engine asks, the GPU engine serves; one iteration of one micro-batch occupies one slot:
//
//   CPU: begin, submit (flags cleared, busy = the request's number), ring
//   GPU: accept, embedding … q, k, v of layer 0 into kQkv, done[0] = 1
//   for each layer l
//     CPU: wait for done[l], KV append, attention into kAttended, go[l] = 1
//     GPU: wait for go[l], rest of the layer, q, k, v of the next one or sampled tokens,
//          done[l + 1] = 1
//   GPU: finish (busy = 0); the CPU has what it wants since done[L]
//
// While busy is 0 the slot is the CPU's, who clears what a failed iteration has left; else either
// side writes its own words only. No wait is for ever: it ends with the flag, with the word
// that the other side has given up or has been replaced, with that side's death, or at a deadline.
// Whoever serves begins a new generation when it starts and after each iteration that came to
// nothing; what was asked in an older one is dropped.
//
// Flags are 32-bit words of value 0 or 1, so that a device can wait for and write them too: it does
// not wake sleepers, hence no sleep is long.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "mailbox_layout.h"

namespace dualpace {

enum Side { kCpuSide = 0, kGpuSide = 1 };

enum class Waited {
  kReady,
  kTimedOut,   // the peer lives, and has not come to it within Patience::total
  kPeerGone,   // its process has ended, or it has shown no sign of life within Patience::silence
  kCancelled,  // one of the sides has given up
};

// "ready", "timed out", "peer gone" or "cancelled".
const char* describe(Waited outcome);

struct Patience {
  int64_t total_us = 30'000'000;   // of any one wait
  int64_t silence_us = 5'000'000;  // between two signs of life of the peer
};

struct Descriptor {
  uint32_t request;     // counts what has been asked of the slot; never 0
  uint32_t generation;  // in which it was asked
  uint64_t iteration;   // the CPU engine's number of the batch
  uint32_t rows;
  uint32_t rules_bytes;
};

class Mailbox {
 public:
  // A view of `base`, MailboxLayout::bytes() of shared memory that is zero at first. Tells the other
  // side that this one lives, from a thread of its own, until it is closed. The GPU side begins a
  // new generation, in which nothing has been asked.
  Mailbox(char* base, const MailboxShape& shape, Side side, Patience patience = {});
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  const MailboxLayout& layout() const { return layout_; }
  template <class T>
  T* area(int slot, Area which) const {
    return reinterpret_cast<T*>(base_ + layout_.area(slot, which));
  }

  uint32_t generation() const {
    return word(MailboxLayout::generation()).load(std::memory_order_acquire);
  }

  // Ends this side's waits, now and from now on, with kCancelled, and tells the other side that this
  // one is gone.
  void close();

  // Throws std::invalid_argument for rows or rules that do not fit a slot.
  void check_fits(size_t rows, size_t rules_bytes) const;

  // -- the CPU's side -----------------------------------------------------------------------------

  // Waits until every slot is this side's.
  Waited begin();

  // Asks for an iteration of the `rows` that have been written into the slot's areas; after `begin`.
  // Throws what check_fits throws.
  void submit(int slot, uint64_t iteration, int rows, std::span<const char> rules);

  void ring();  // wakes the other side's doorbell; once after all submits

  // Any number of threads may wait for the same flag.
  Waited wait_done(int slot, int layer);
  void post_go(int slot, int layer) { post(layout_.go(slot, layer)); }

  // Gives up what was submitted: the other side lets go of the slot as soon as it notices.
  void cancel(int slot);

  // -- the GPU's side -----------------------------------------------------------------------------

  uint32_t request(int slot) const;  // number of what was last asked of the slot

  // Takes on what was asked, and returns its descriptor; rows is 0 if it is of an older generation.
  Descriptor accept(int slot);

  Waited wait_go(int slot, int layer);
  void post_done(int slot, int layer) { post(layout_.done(slot, layer)); }
  void finish(int slot);  // the slot is the CPU's again; after the last post_done
  void fail(int slot);    // the same without a result: a new generation

  // Sleeps until the bell differs from `seen`; returns what it is then. Of the doorbell's thread.
  uint32_t wait_bell(uint32_t seen);
  uint32_t bell() const;

 private:
  // What this side knows of the iteration in a slot.
  struct Call {
    uint32_t request = 0;
    uint32_t generation = 0;
    uint32_t peer = 0;  // process id
  };
  class Silence;

  std::atomic_ref<uint32_t> word(size_t offset) const {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(base_ + offset));
  }
  uint32_t peer_pid() const;
  void post(size_t flag);
  void release(int slot, uint32_t request);  // if it is still that one's
  // Until the word is `wanted`. `call` is null before anything is asked.
  Waited wait(size_t flag, uint32_t wanted, int slot, const Call* call);
  void live();

  char* base_;
  MailboxLayout layout_;
  Side side_;
  Patience patience_;
  int64_t spin_us_;
  std::array<Call, kSlots> calls_;
  std::atomic<bool> interrupted_{false};

  std::mutex closing_;
  std::condition_variable closed_;
  bool is_closed_ = false;
  std::thread pulse_;
};

}  // namespace dualpace
