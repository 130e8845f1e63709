// A persistent pool of pinned threads that run one program together.
//
// Knows nothing of models. The calling thread is thread 0 of every run; while it runs it is pinned
// like the others, and gets its own affinity back afterwards. Waiting threads spin briefly and then
// sleep on a futex, so that an idle pool costs no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace dualpace {

// Items [begin, end) of a list.
struct Range {
  int begin, end;
  bool empty() const { return begin >= end; }
};

// A 32-bit word that threads wait on until it changes.
class alignas(64) Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  // Adds one and wakes whoever sleeps.
  void advance();

  // Returns once the word differs from `seen`: spins for `spin_us` microseconds, then sleeps.
  void wait_past(uint32_t seen, int spin_us);

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class ThreadPool {
 public:
  // One thread per entry of `cpu_ids`, in that order. Throws std::invalid_argument if there is none
  // or one names a CPU that this process may not use.
  explicit ThreadPool(std::vector<int> cpu_ids);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(cpu_ids_.size()); }

  // Runs `body(thread)` on every thread, 0 <= thread < size(), and returns when all have returned.
  // `body` must not throw. One run at a time; concurrent callers take turns.
  template <class Body>
  void run(const Body& body) {
    run_erased([](const void* context, int thread) noexcept {
      (*static_cast<const Body*>(context))(thread);
    }, &body);
  }

  // Called by every thread inside a run: returns once all have called it. What was written before
  // is visible to all after.
  void barrier();

  // Part [begin, end) of a list of `count` items that all threads share, `chunk` at a time: every
  // item goes to exactly one thread, whoever comes first, and an empty part ends a thread's work.
  // One list between two barriers. Cores are not equally fast: other machines run on them too.
  Range take(int count, int chunk);

  // The same in parts that shrink as the list does, from `most` down to `least` items: few parts,
  // and none so long at the end that the others wait for it.
  Range take_shrinking(int count, int least, int most);

 private:
  using Entry = void (*)(const void* context, int thread);

  void run_erased(Entry entry, const void* context);
  void work(int thread);

  std::vector<int> cpu_ids_;
  std::vector<std::thread> workers_;
  std::mutex turn_;
  Entry entry_ = nullptr;  // null at a start: the workers end
  const void* context_ = nullptr;
  int idle_spin_us_;
  Signal start_;
  Signal passed_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> taken_{0};  // of the list; 0 again after each barrier
};

}  // namespace dualpace
