// Waiting on a 32-bit word: a pause while spinning, and the kernel's futex for what lasts longer.
//
// Knows nothing of what the words mean. Private words are seen by the threads of one process only;
// shared ones lie in memory that several processes map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdint>

namespace dualpace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

enum class Reach { kPrivate, kShared };

inline long futex(void* word, int operation, uint32_t value, const timespec* timeout, Reach reach) {
  const int scope = reach == Reach::kPrivate ? FUTEX_PRIVATE_FLAG : 0;
  return syscall(SYS_futex, word, operation | scope, value, timeout, nullptr, 0);
}

// Sleeps while the word is `seen`, until somebody wakes it, `timeout_ns` have passed (never, if
// negative), or for no reason: look at the word again.
inline void futex_wait(void* word, uint32_t seen, int64_t timeout_ns, Reach reach) {
  const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                         static_cast<long>(timeout_ns % 1'000'000'000)};
  futex(word, FUTEX_WAIT, seen, timeout_ns < 0 ? nullptr : &timeout, reach);
}

inline void futex_wake_all(void* word, Reach reach) {
  futex(word, FUTEX_WAKE, INT_MAX, nullptr, reach);
}

}  // namespace dualpace
