// Linear layers for bfloat16 weights and activations on tiles; see amx_linear.h.
#pragma once

#include "kernels.h"

namespace dualpace {

// Needs AMX-TILE and AMX-BF16, and the kernel's permission for this process to use tiles.
void amx_linear(const LinearArgs* args);

// The same loops in plain C++, anywhere.
void amx_emulated_linear(const LinearArgs* args);

}  // namespace dualpace
