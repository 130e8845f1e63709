// Which kernels this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace dualpace {

// Names of the instruction sets that were built and that CPU and operating system support, best
// last. Decided once.
const std::vector<std::string>& supported_isas();

// The kernels of `isa` ("auto" takes the best). Throws std::invalid_argument for a name that does
// not exist and std::runtime_error for one that this machine lacks.
const KernelTable* select_kernels(const std::string& isa);

}  // namespace dualpace
