// Memory in pages of 2 MiB, where the kernel grants them: read-bound kernels run up to a third
// faster on them than on pages of 4 KiB.
//
// Knows mappings and madvise; does not know what is stored.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace dualpace {

constexpr size_t kHugePage = size_t{2} << 20;

void* allocate_huge(size_t bytes);  // throws std::bad_alloc
void free_huge(void* memory);

// One private mapping at a multiple of 2 MiB, huge pages asked for, zero at first.
class Mapping {
 public:
  explicit Mapping(size_t bytes);  // throws std::bad_alloc
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // The next `bytes`, 64-byte aligned.
  char* take(size_t bytes);

  const char* data() const { return base_; }
  size_t used() const { return used_; }

 private:
  char* base_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

// For std::vector: zeroed or not as the vector does it, at a cache line, and from half a huge page on
// in huge pages. Rows of activations lie kilobytes apart, each in a small page of its own: a tile of
// 16 of them would ask for 16 translations.
template <class T>
struct HugeAllocator {
  using value_type = T;
  HugeAllocator() = default;
  template <class U>
  HugeAllocator(const HugeAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(allocate_huge(count * sizeof(T))); }
  void deallocate(T* memory, size_t) { free_huge(memory); }
  bool operator==(const HugeAllocator&) const { return true; }
};

using HugeFloats = std::vector<float, HugeAllocator<float>>;

// Maps the first `bytes` of a shared memory file, readable and writable, at a multiple of 2 MiB:
// elsewhere it could not have huge pages. Throws std::system_error.
char* map_shared(int descriptor, size_t bytes);
void unmap_shared(char* base, size_t bytes);

// Gives [base, base + bytes) of a shared mapping its memory, in huge pages if that can be had, on
// the pool's threads, in runs of some milliseconds between which its other users get their turn.
// What is stored stays, also what other processes write meanwhile. Returns what was got, as
// describe_pages does, with the kernel's reason if it refused.
std::string prepare_arena(ThreadPool& pool, char* base, size_t bytes);

// "2 MiB pages", "4 KiB pages" or "43% in 2 MiB pages": what the memory of this process in
// [base, base + bytes) really lies in, from /proc/self/smaps, which counts whole mappings.
std::string describe_pages(const char* base, size_t bytes);

}  // namespace dualpace
