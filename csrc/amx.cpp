// Linear layers and attention on AMX tiles.
//
// Instructions are written out, because g++ 12 miscompiles around its own intrinsics: it takes
// _tile_loadconfig for a read of eight bytes and _tile_loadd for no read of memory at all, and
// deletes the stores before them.
#include "amx_attention.h"
#include "amx_linear.h"

namespace dualpace {
namespace {

struct HardwareTiles {
  // Rows in registers 0, 1 and 4, and, beyond 16, in 2, 3 and 5. Registers 6 and 7 are always full.
  static void configure(int rows) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int first = rows < kTileRows ? rows : kTileRows;
    const int second = rows > kTileRows ? rows - kTileRows : 1;
    const int heights[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kTileRowBytes;
      config.rows[i] = static_cast<uint8_t>(heights[i]);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }

  static void release() { __asm__ volatile("tilerelease"); }

  template <int R>
  static inline void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(R));
  }

  template <int R>
  static inline void load(const void* p, size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(R) : "memory");
  }

  template <int R>
  static inline void store(void* p, size_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(R) : "memory");
  }

  static inline void fetch_to_write(const char* p) {
    __asm__ volatile("prefetchw %0" : : "m"(*p));
  }

  template <int C, int A, int B>
  static inline void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

}  // namespace

void amx_linear(const LinearArgs* args) { linear_on_tiles<HardwareTiles>(args); }
void amx_attention(const AttentionArgs* args) { attention_on_tiles<HardwareTiles>(args); }

}  // namespace dualpace
