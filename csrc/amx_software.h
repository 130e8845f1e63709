// A tile unit in plain C++: slow, for tests where there is no AMX.
//
// In an unnamed namespace, because the units that include this are compiled with different flags.
#pragma once

#include "amx.h"

#include <string.h>

namespace dualpace {
namespace {

inline float widen_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &word, sizeof x);
  return x;
}

// One set of registers per thread, as in hardware. Rows beyond the configured ones are not touched.
struct SoftwareTiles {
  struct Registers {
    int rows[8];
    alignas(64) char data[8][kTileRows][kTileRowBytes];
  };
  static Registers& registers() {
    static thread_local Registers all;
    return all;
  }

  static void configure(int rows) {
    const int first = rows < kTileRows ? rows : kTileRows;
    const int second = rows > kTileRows ? rows - kTileRows : 1;
    const int heights[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    memcpy(registers().rows, heights, sizeof heights);
  }

  static void release() { memset(&registers(), 0xff, sizeof(Registers)); }

  template <int R>
  static void zero() {
    memset(registers().data[R], 0, sizeof registers().data[R]);
  }

  template <int R>
  static void load(const void* p, size_t stride) {
    for (int i = 0; i < registers().rows[R]; ++i) {
      memcpy(registers().data[R][i], static_cast<const char*>(p) + i * stride, kTileRowBytes);
    }
  }

  template <int R>
  static void store(void* p, size_t stride) {
    for (int i = 0; i < registers().rows[R]; ++i) {
      memcpy(static_cast<char*>(p) + i * stride, registers().data[R][i], kTileRowBytes);
    }
  }

  static void fetch_to_write(const char*) {}

  template <int C, int A, int B>
  static void multiply() {
    for (int i = 0; i < registers().rows[C]; ++i) {
      const uint16_t* a = reinterpret_cast<const uint16_t*>(registers().data[A][i]);
      float* c = reinterpret_cast<float*>(registers().data[C][i]);
      for (int pair = 0; pair < kTileRows; ++pair) {
        const uint16_t* b = reinterpret_cast<const uint16_t*>(registers().data[B][pair]);
        for (int j = 0; j < kTileRows; ++j) {
          c[j] += widen_bf16(a[2 * pair]) * widen_bf16(b[2 * j]);
          c[j] += widen_bf16(a[2 * pair + 1]) * widen_bf16(b[2 * j + 1]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace dualpace
