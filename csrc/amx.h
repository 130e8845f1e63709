// Kernels for bfloat16 weights and KV on tiles, and what every tile unit has.
//
// A tile unit has eight registers of 16 rows x 64 bytes and multiplies pairs of bfloat16:
// multiply<C, A, B>() adds to C[i][j] the products of the pairs A[i][p] and B[p][j]. `amx.cpp` gives
// the loops of amx_linear.h and amx_attention.h the hardware's, amx_software.h one in plain C++, so
// that they are tested where there is no AMX.
#pragma once

#include "kernels.h"

namespace dualpace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;  // one KiB
constexpr int kTileFloats = kTileBytes / 4;
constexpr int kStepBytes = kAlignK * 2;  // 32 values of k: a row of a tile of activations
static_assert(kStepBytes == kTileRowBytes, "steps of k are tiles");

// Activations of a call up to this size are expected to stay in the second-level cache, beside the
// weights that stream through it, from one pair of panels to the next and from call to call.
constexpr size_t kKeptBytes = 512 << 10;

// Need AMX-TILE, AMX-BF16 and AVX-512, and the kernel's permission for this process to use tiles.
void amx_linear(const LinearArgs* args);
void amx_attention(const AttentionArgs* args);

// The same loops on software tiles: the first anywhere, the second where there is AVX-512.
void amx_emulated_linear(const LinearArgs* args);
void amx_emulated_attention(const AttentionArgs* args);

}  // namespace dualpace
