// Linear layers for bfloat16 weights and activations on tiles; see amx_linear.h for the loops and
// linear_tiles.h for who computes what.
#pragma once

#include "kernels.h"

namespace dualpace {

constexpr int kTileRows = 16;
constexpr int kStepBytes = kAlignK * 2;             // one row of an activation tile
constexpr int kTileBytes = kTileRows * kStepBytes;  // of activations, or of weights: 32 k x 16

// Activations of a call up to this size are expected to stay in the second-level cache, beside the
// weights that stream through it, from one pair of panels to the next and from call to call.
constexpr size_t kKeptBytes = 512 << 10;

// Needs AMX-TILE and AMX-BF16, and the kernel's permission for this process to use tiles.
void amx_linear(const LinearArgs* args);

// The same loops in plain C++, anywhere.
void amx_emulated_linear(const LinearArgs* args);

}  // namespace dualpace
