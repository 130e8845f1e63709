// Numbers, CPUs and kernels for the tests of the C++ code.
#pragma once

#include <sched.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "dispatch.h"

namespace dualpace {

inline std::mt19937 generator(1);

inline std::vector<float> normal(size_t count) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

// `threads` entries over the CPUs of this process, several threads to a CPU if need be.
inline std::vector<int> cpus(int threads) {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  std::vector<int> all, chosen;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &allowed)) all.push_back(cpu);
  }
  for (int i = 0; i < threads; ++i) chosen.push_back(all[static_cast<size_t>(i) % all.size()]);
  return chosen;
}

inline std::vector<const KernelTable*> all_kernels() {
  std::vector<const KernelTable*> tables{select_kernels("amx_emulated")};
  for (const std::string& isa : supported_isas()) tables.push_back(select_kernels(isa));
  return tables;
}

inline double relative_l2(const float* got, const std::vector<double>& want) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

}  // namespace dualpace
