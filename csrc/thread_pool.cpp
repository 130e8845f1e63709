#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "futex.h"

namespace dualpace {
namespace {

// Spinning between runs hides the futex round trip (tens of microseconds) while tokens follow each
// other closely. With few cores somebody else needs the core sooner.
constexpr int kFewCores = 8;
constexpr int kIdleSpinUs = 2000;
constexpr int kIdleSpinFewCoresUs = 150;
// Inside a run all threads reach a barrier almost together, unless one has lost its core.
constexpr int kBarrierSpinUs = 200;
// Parts per thread that the rest of a shrinking list would make, were they all equal.
constexpr int kPartsLeft = 3;

cpu_set_t single_cpu(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  return set;
}

// Pins the calling thread to one CPU for as long as the object lives.
class Pinned {
 public:
  explicit Pinned(int cpu) {
    const cpu_set_t wanted = single_cpu(cpu);
    if (sched_getaffinity(0, sizeof before_, &before_) != 0 || CPU_EQUAL(&before_, &wanted)) return;
    moved_ = sched_setaffinity(0, sizeof wanted, &wanted) == 0;
  }
  ~Pinned() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void Signal::advance() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(&word_, Reach::kPrivate);
}

void Signal::wait_past(uint32_t seen, int spin_us) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < 64; ++i) {
      if (value() != seen) return;
      pause_cpu();
    }
  } while (Clock::now() < deadline);
  // Announced before the last look at the word: either the waker sees the sleeper, or the sleeper
  // (or the kernel, comparing for it) sees the new word.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word_.load(std::memory_order_seq_cst) == seen) {
    futex_wait(&word_, seen, -1, Reach::kPrivate);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

ThreadPool::ThreadPool(std::vector<int> cpu_ids)
    : cpu_ids_(std::move(cpu_ids)),
      idle_spin_us_(std::thread::hardware_concurrency() < kFewCores ? kIdleSpinFewCoresUs
                                                                    : kIdleSpinUs) {
  if (cpu_ids_.empty()) throw std::invalid_argument("a thread pool needs at least one CPU");
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
    throw std::runtime_error("sched_getaffinity failed");
  }
  for (const int cpu : cpu_ids_) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(static_cast<size_t>(cpu), &allowed)) {
      throw std::invalid_argument("CPU " + std::to_string(cpu) +
                                  " is not available to this process");
    }
  }
  workers_.reserve(cpu_ids_.size() - 1);
  for (int thread = 1; thread < size(); ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  entry_ = nullptr;
  start_.advance();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::work(int thread) {
  pthread_setname_np(pthread_self(), "dualpace-cpu");
  const Pinned pinned(cpu_ids_[static_cast<size_t>(thread)]);
  // Counted from 0 and not read from the signal: a run may have started before this thread did.
  for (uint32_t seen = 0;; ++seen) {
    start_.wait_past(seen, idle_spin_us_);
    if (entry_ == nullptr) return;
    entry_(context_, thread);
    barrier();
  }
}

void ThreadPool::run_erased(Entry entry, const void* context) {
  const std::lock_guard<std::mutex> lock(turn_);
  const Pinned pinned(cpu_ids_[0]);
  entry_ = entry;
  context_ = context;
  start_.advance();
  entry(context, 0);
  barrier();
}

Range ThreadPool::take(int count, int chunk) {
  const int begin = taken_.fetch_add(chunk, std::memory_order_relaxed);
  return {begin, begin < count - chunk ? begin + chunk : count};
}

Range ThreadPool::take_shrinking(int count, int least, int most) {
  int begin = taken_.load(std::memory_order_relaxed);
  while (begin < count) {
    const int fair = (count - begin) / (kPartsLeft * size());
    const int chunk = std::max(least, std::min(fair / least * least, most));
    if (taken_.compare_exchange_weak(begin, begin + chunk, std::memory_order_relaxed)) {
      return {begin, std::min(begin + chunk, count)};
    }
  }
  return {count, count};
}

void ThreadPool::barrier() {
  const uint32_t seen = passed_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
    arrived_.store(0, std::memory_order_relaxed);
    taken_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait_past(seen, kBarrierSpinUs);
  }
}

}  // namespace dualpace
