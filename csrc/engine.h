// What every operation of the CPU engine runs on.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "thread_pool.h"

namespace dualpace {

// A pinned thread pool and the kernels of one instruction set.
class Engine {
 public:
  // Throws what ThreadPool and select_kernels throw.
  Engine(std::vector<int> cpu_ids, const std::string& isa)
      : kernels_(select_kernels(isa)), pool_(std::move(cpu_ids)) {}

  const KernelTable& kernels() const { return *kernels_; }
  ThreadPool& pool() { return pool_; }

 private:
  const KernelTable* kernels_;
  ThreadPool pool_;
};

}  // namespace dualpace
