#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace dualpace {
namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kSmallPage = 4096;
// Since Linux 5.14 and 6.1; the headers that we are built with may be older.
constexpr int kPopulateWrite = 23;
constexpr int kCollapse = 25;

// How long prepare_arena keeps the pool at a time. Long enough to keep ahead of a server's growth
// with one such run between two iterations, short beside an iteration.
constexpr std::chrono::milliseconds kRunTime{4};

constexpr size_t round_to(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Address space for `bytes` at a multiple of 2 MiB, not accessible yet; null if there is none.
char* reserve_aligned(size_t bytes) {
  void* space = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(space);
  const size_t skip =
      round_to(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
  if (skip != 0) munmap(begin, skip);
  munmap(begin + skip + bytes, kHugePage - skip);
  return begin + skip;
}

// 2 MiB at `unit` in one page, or errno. The collapse looks for a page table, which a mapping that
// nobody has touched does not have; hence one small page first.
int collapse(char* unit) {
  if (madvise(unit, kSmallPage, kPopulateWrite) != 0) return errno;
  return madvise(unit, kHugePage, kCollapse) == 0 ? 0 : errno;
}

std::string percent_text(double share) {
  if (share > 0.995) return "2 MiB pages";
  if (share < 0.005) return "4 KiB pages";
  return std::to_string(static_cast<int>(share * 100.0 + 0.5)) + "% in 2 MiB pages";
}

}  // namespace

void* allocate_huge(size_t bytes) {
  const size_t unit = bytes < kHugePage / 2 ? 64 : kHugePage;
  const size_t size = (bytes + unit - 1) / unit * unit;
  void* memory = std::aligned_alloc(unit, std::max(size, unit));
  if (memory == nullptr) throw std::bad_alloc();
  if (unit == kHugePage) madvise(memory, size, MADV_HUGEPAGE);
  return memory;
}

void free_huge(void* memory) { std::free(memory); }

Mapping::Mapping(size_t bytes) : size_(round_to(std::max<size_t>(bytes, 1), kHugePage)) {
  base_ = reserve_aligned(size_);
  if (base_ == nullptr) throw std::bad_alloc();
  if (mmap(base_, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    munmap(base_, size_);
    throw std::bad_alloc();
  }
  madvise(base_, size_, MADV_HUGEPAGE);  // a wish; describe_pages tells what came of it
}

Mapping::~Mapping() { munmap(base_, size_); }

char* Mapping::take(size_t bytes) {
  char* slice = base_ + used_;
  used_ += round_to(bytes, kLineBytes);
  if (used_ > size_) throw std::logic_error("weights outgrew their mapping");
  return slice;
}

char* map_shared(int descriptor, size_t bytes) {
  const size_t size = round_to(bytes, kSmallPage);
  char* base = reserve_aligned(size);
  if (base == nullptr) throw std::system_error(errno, std::generic_category(), "mmap");
  if (mmap(base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) ==
      MAP_FAILED) {
    const int reason = errno;
    munmap(base, size);
    throw std::system_error(reason, std::generic_category(), "mmap");
  }
  return base;
}

void unmap_shared(char* base, size_t bytes) { munmap(base, round_to(bytes, kSmallPage)); }

std::string prepare_arena(ThreadPool& pool, char* base, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base) / kSmallPage * kSmallPage;
  const uintptr_t end = round_to(reinterpret_cast<uintptr_t>(base) + bytes, kSmallPage);
  const uintptr_t first = round_to(begin, kHugePage), last = end / kHugePage * kHugePage;
  const auto populate = [](uintptr_t from, uintptr_t to) {
    if (from < to) madvise(reinterpret_cast<char*>(from), to - from, kPopulateWrite);
  };
  if (first >= last) {
    populate(begin, end);
    return "4 KiB pages (smaller than 2 MiB)";
  }
  populate(begin, first);
  populate(last, end);

  const size_t units = (last - first) / kHugePage;
  std::atomic<size_t> huge{0};
  std::atomic<int> refusal{0};
  std::atomic<bool> hopeless{false};
  const auto prepare = [&](char* unit) {
    int error = hopeless ? EINVAL : collapse(unit);
    if (error != 0) madvise(unit, kHugePage, kPopulateWrite);
    if (error != 0 && !hopeless) {
      error = collapse(unit);  // some kernels collapse only what is there in full
      if (error == EINVAL) hopeless = true;  // not in this kernel, or not in this kind of memory
    }
    if (error == 0) {
      madvise(unit, kHugePage, kPopulateWrite);  // into our page table
      ++huge;
    } else {
      refusal = error;
    }
  };
  std::atomic<size_t> taken{0};
  while (taken < units) {
    pool.run([&](int) {
      const auto deadline = std::chrono::steady_clock::now() + kRunTime;
      do {
        const size_t i = taken++;
        if (i >= units) return;
        prepare(reinterpret_cast<char*>(first) + i * kHugePage);
      } while (std::chrono::steady_clock::now() < deadline);
    });
    // The pool's lock is not fair: without a pause we would take it again before a waiting
    // iteration has woken up.
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  std::string got = percent_text(static_cast<double>(huge) / static_cast<double>(units));
  if (refusal != 0) {
    got += " (MADV_COLLAPSE: " + std::generic_category().message(refusal) + ")";
  }
  return got;
}

std::string describe_pages(const char* base, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base), end = begin + bytes;
  std::ifstream smaps("/proc/self/smaps");
  bool ours = false;
  uint64_t resident = 0, huge = 0;  // KiB
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t from = 0, to = 0;
    char name[32];
    uint64_t value = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      ours = from < end && to > begin;
    } else if (ours && std::sscanf(line.c_str(), "%31[A-Za-z]: %" SCNu64, name, &value) == 2) {
      const std::string field = name;
      if (field == "Rss") resident += value;
      if (field == "AnonHugePages" || field == "ShmemPmdMapped") huge += value;
    }
  }
  return percent_text(resident == 0 ? 0.0
                                    : static_cast<double>(huge) / static_cast<double>(resident));
}

}  // namespace dualpace
