#include "mailbox.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>

#include "futex.h"

namespace dualpace {
namespace {

using Clock = std::chrono::steady_clock;

// A layer of the peer takes some hundred microseconds: a sleep would cost more than it saves, unless
// the core is needed by others.
constexpr unsigned kFewCores = 8;
constexpr int64_t kSpinUs = 5000;
constexpr int64_t kSpinFewCoresUs = 20;
// A sleep is a part of the time waited so far, so that it delays what a device writes by no more
// than that part.
constexpr int64_t kShortestSleepUs = 20;
constexpr int64_t kLongestSleepUs = 1000;
constexpr std::chrono::milliseconds kPulse{10};

// Behind a flag in its cache line: how many sleep on it.
constexpr size_t kSleepers = sizeof(uint32_t);
// Behind a process id: counts while the process lives.
constexpr size_t kBeat = sizeof(uint32_t);

int64_t us_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}

}  // namespace

const char* describe(Waited outcome) {
  switch (outcome) {
    case Waited::kReady: return "ready";
    case Waited::kTimedOut: return "timed out";
    case Waited::kPeerGone: return "peer gone";
    case Waited::kCancelled: return "cancelled";
  }
  return "";
}

Mailbox::Mailbox(char* base, const MailboxShape& shape, Side side, Patience patience)
    : base_(base),
      layout_(shape),
      side_(side),
      patience_(patience),
      spin_us_(std::thread::hardware_concurrency() < kFewCores ? kSpinFewCoresUs : kSpinUs) {
  if (side == kGpuSide) {
    // What is asked from here on is either of the old generation, which the doorbell drops, or of the
    // new one, and then its slot had become the CPU's before.
    std::array<uint32_t, kSlots> left{};
    for (int slot = 0; slot < kSlots; ++slot) {
      left[static_cast<size_t>(slot)] = word(layout_.busy(slot)).load();
    }
    word(MailboxLayout::generation()).fetch_add(1);
    for (int slot = 0; slot < kSlots; ++slot) release(slot, left[static_cast<size_t>(slot)]);
  }
  word(MailboxLayout::presence(side)).store(static_cast<uint32_t>(getpid()));
  pulse_ = std::thread([this] { live(); });
}

Mailbox::~Mailbox() { close(); }

void Mailbox::close() {
  {
    const std::lock_guard<std::mutex> lock(closing_);
    if (is_closed_) return;
    is_closed_ = true;
  }
  interrupted_.store(true);
  closed_.notify_all();
  pulse_.join();
  word(MailboxLayout::presence(side_)).store(0);
}

void Mailbox::live() {
  pthread_setname_np(pthread_self(), "dualpace-pulse");
  std::unique_lock<std::mutex> lock(closing_);
  while (!closed_.wait_for(lock, kPulse, [this] { return is_closed_; })) {
    word(MailboxLayout::presence(side_) + kBeat).fetch_add(1, std::memory_order_relaxed);
  }
}

uint32_t Mailbox::peer_pid() const {
  return word(MailboxLayout::presence(1 - side_)).load(std::memory_order_acquire);
}

void Mailbox::post(size_t flag) {
  // Ordered before the look at the sleepers, who announce themselves before they look at the flag.
  word(flag).store(1, std::memory_order_seq_cst);
  if (word(flag + kSleepers).load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(base_ + flag, Reach::kShared);
  }
}

// Has the peer shown no sign of life for too long? Its death is noticed at once if it has been
// reaped, and else by its silence.
class Mailbox::Silence {
 public:
  Silence(const Mailbox& mailbox, uint32_t peer)
      : mailbox_(mailbox), peer_(peer), beat_(beat()), since_(Clock::now()) {}

  bool too_long() {
    if (peer_ == 0 || mailbox_.peer_pid() != peer_) return true;
    if (kill(static_cast<pid_t>(peer_), 0) != 0 && errno == ESRCH) return true;
    const uint32_t now = beat();
    if (now != beat_) {
      beat_ = now;
      since_ = Clock::now();
    }
    return us_since(since_) > mailbox_.patience_.silence_us;
  }

 private:
  uint32_t beat() const {
    return mailbox_.word(MailboxLayout::presence(1 - mailbox_.side_) + kBeat)
        .load(std::memory_order_relaxed);
  }

  const Mailbox& mailbox_;
  uint32_t peer_, beat_;
  Clock::time_point since_;
};

Waited Mailbox::wait(size_t flag, uint32_t wanted, int slot, const Call* call) {
  const auto there = [&] { return word(flag).load(std::memory_order_acquire) == wanted; };
  const auto started = Clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (there()) return Waited::kReady;
      pause_cpu();
    }
  } while (us_since(started) < spin_us_);

  Silence silence(*this, call != nullptr ? call->peer : peer_pid());
  const auto given_up = [&] {
    if (interrupted_.load(std::memory_order_relaxed)) return true;
    return call != nullptr &&
           (word(layout_.cancelled(slot)).load(std::memory_order_acquire) == call->request ||
            generation() != call->generation);
  };
  for (;;) {
    const int64_t waited = us_since(started);
    // The flag last: what came before one of these still counts.
    const bool cancelled = given_up(), gone = silence.too_long();
    const bool late = waited > patience_.total_us;
    if (there()) return Waited::kReady;
    if (cancelled) return Waited::kCancelled;
    if (gone) return Waited::kPeerGone;
    if (late) return Waited::kTimedOut;
    const int64_t sleep_us = std::clamp(waited / 8, kShortestSleepUs, kLongestSleepUs);
    word(flag + kSleepers).fetch_add(1, std::memory_order_seq_cst);
    const uint32_t value = word(flag).load(std::memory_order_seq_cst);
    if (value != wanted) futex_wait(base_ + flag, value, sleep_us * 1000, Reach::kShared);
    word(flag + kSleepers).fetch_sub(1, std::memory_order_relaxed);
  }
}

void Mailbox::check_fits(size_t rows, size_t rules_bytes) const {
  const size_t most = static_cast<size_t>(layout_.shape().max_rows);
  if (rows < 1 || rows > most) {
    throw std::invalid_argument("a slot of the mailbox takes 1 to " + std::to_string(most) +
                                " rows, not " + std::to_string(rows));
  }
  if (rules_bytes > layout_.area_bytes(kRules)) {
    throw std::invalid_argument("the rows' sampling rules do not fit the mailbox: " +
                                std::to_string(rules_bytes) + " bytes");
  }
}

// -- the CPU's side -------------------------------------------------------------------------------

Waited Mailbox::begin() {
  for (int slot = 0; slot < kSlots; ++slot) {
    const Waited outcome = wait(layout_.busy(slot), 0, slot, nullptr);
    if (outcome != Waited::kReady) return outcome;
  }
  const uint32_t peer = peer_pid();
  if (peer == 0) return Waited::kPeerGone;
  for (Call& call : calls_) {
    call.generation = generation();
    call.peer = peer;
  }
  return Waited::kReady;
}

void Mailbox::submit(int slot, uint64_t iteration, int rows, std::span<const char> rules) {
  check_fits(static_cast<size_t>(rows), rules.size());
  // Sleepers of a process that was killed are forgotten with the flags.
  for (size_t flag = 0; flag < layout_.flags_bytes(); flag += kFlagBytes) {
    word(layout_.go(slot, 0) + flag).store(0, std::memory_order_relaxed);
    word(layout_.go(slot, 0) + flag + kSleepers).store(0, std::memory_order_relaxed);
  }
  std::copy(rules.begin(), rules.end(), area<char>(slot, kRules));
  Descriptor& descriptor = *area<Descriptor>(slot, kDescriptor);
  Call& call = calls_[static_cast<size_t>(slot)];
  const std::atomic_ref<uint32_t> request(descriptor.request);
  call.request = request.load(std::memory_order_relaxed) + 1;
  if (call.request == 0) call.request = 1;
  descriptor.generation = call.generation;
  descriptor.iteration = iteration;
  descriptor.rows = static_cast<uint32_t>(rows);
  descriptor.rules_bytes = static_cast<uint32_t>(rules.size());
  word(layout_.busy(slot)).store(call.request, std::memory_order_relaxed);
  request.store(call.request, std::memory_order_release);
}

void Mailbox::ring() {
  word(MailboxLayout::bell()).fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(base_ + MailboxLayout::bell(), Reach::kShared);
}

Waited Mailbox::wait_done(int slot, int layer) {
  return wait(layout_.done(slot, layer), 1, slot, &calls_[static_cast<size_t>(slot)]);
}

void Mailbox::cancel(int slot) {
  word(layout_.cancelled(slot)).store(calls_[static_cast<size_t>(slot)].request);
}

// -- the GPU's side -------------------------------------------------------------------------------

uint32_t Mailbox::request(int slot) const {
  const std::atomic_ref<uint32_t> request(area<Descriptor>(slot, kDescriptor)->request);
  return request.load(std::memory_order_acquire);
}

Descriptor Mailbox::accept(int slot) {
  Call& call = calls_[static_cast<size_t>(slot)];
  call.request = request(slot);
  call.generation = generation();
  call.peer = peer_pid();
  const Descriptor& shared = *area<Descriptor>(slot, kDescriptor);
  Descriptor descriptor{call.request, shared.generation, shared.iteration, shared.rows,
                        shared.rules_bytes};
  if (request(slot) != call.request) {  // replaced meanwhile: its own ring will bring us back
    descriptor.rows = 0;
    return descriptor;
  }
  if (descriptor.generation != call.generation ||
      descriptor.rows > static_cast<uint32_t>(layout_.shape().max_rows) ||
      descriptor.rules_bytes > layout_.area_bytes(kRules)) {
    descriptor.rows = 0;
    release(slot, call.request);
  }
  return descriptor;
}

Waited Mailbox::wait_go(int slot, int layer) {
  return wait(layout_.go(slot, layer), 1, slot, &calls_[static_cast<size_t>(slot)]);
}

void Mailbox::finish(int slot) { release(slot, calls_[static_cast<size_t>(slot)].request); }

void Mailbox::release(int slot, uint32_t request) {
  if (!word(layout_.busy(slot)).compare_exchange_strong(request, 0, std::memory_order_seq_cst)) {
    return;
  }
  if (word(layout_.busy(slot) + kSleepers).load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(base_ + layout_.busy(slot), Reach::kShared);
  }
}

void Mailbox::fail(int slot) {
  word(MailboxLayout::generation()).fetch_add(1);
  finish(slot);
}

uint32_t Mailbox::bell() const {
  return word(MailboxLayout::bell()).load(std::memory_order_seq_cst);
}

uint32_t Mailbox::wait_bell(uint32_t seen) {
  uint32_t now;
  while ((now = bell()) == seen) {
    futex_wait(base_ + MailboxLayout::bell(), seen, -1, Reach::kShared);
  }
  return now;
}

}  // namespace dualpace
