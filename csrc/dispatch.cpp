#include "dispatch.h"

#include <stdexcept>

#include "amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dualpace {
namespace {

#if defined(__x86_64__)
// True if CPUID reports AVX2 and FMA and the operating system saves the ymm registers (XCR0). A
// hypervisor may show the first without the second.
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const unsigned fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28;
  if ((c & fma) == 0 || (c & osxsave) == 0 || (c & avx) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x6u) != 0x6u) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 5)) != 0;
}

// True for AVX-512 F, BW, DQ and VL, and if the operating system saves mask and zmm registers too.
bool has_avx512() {
  if (!has_avx2()) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0xe6u) != 0xe6u) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted;
}

bool has_avx512_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5)) != 0;
}

// True if the CPU has bfloat16 tiles, the operating system saves them (XCR0), and the kernel lets
// this process use them: without its permission the first tile instruction is a SIGILL.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (1u << 27)) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x60000u) != 0x60000u) return false;
  const unsigned bf16 = 1u << 22, tile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16 | tile)) != (bf16 | tile)) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// `base` with linear layers of bfloat16 weights and attention to bfloat16 KV on tiles.
const KernelTable* with_amx(const KernelTable* base) {
  static const KernelTable table = [base] {
    KernelTable copy = *base;
    copy.name = "amx";
    copy.activations[kBFloat16] = kBFloat16;
    copy.linear[kBFloat16] = amx_linear;
    copy.on_tiles = true;
    copy.attention[kBFloat16] = amx_attention;
    copy.heads_together = true;
    return copy;
  }();
  return &table;
}
#endif

struct Candidate {
  const char* name;
  const KernelTable* table;  // null: not built for this architecture, or not supported here
  bool offered = true;       // by "auto" and supported_isas()
};

// The tile loops in plain C++, for tests; everything else is the portable table's.
const KernelTable* emulated_amx() {
  static const KernelTable table = [] {
    KernelTable copy = *portable_kernels();
    copy.name = "amx_emulated";
    copy.activations[kBFloat16] = kBFloat16;
    copy.linear[kBFloat16] = amx_emulated_linear;
    copy.on_tiles = true;
#if defined(DUALPACE_HAVE_AVX2)
    if (has_avx512()) {
      copy.attention[kBFloat16] = amx_emulated_attention;
      copy.heads_together = true;
    }
#endif
    return copy;
  }();
  return &table;
}

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = [] {
    std::vector<Candidate> found{{"amx_emulated", emulated_amx(), false},
                                 {"portable", portable_kernels()}};
#if defined(DUALPACE_HAVE_AVX2)
    found.push_back({"avx2", has_avx2() ? avx2_kernels() : nullptr});
    found.push_back({"avx512", has_avx512() ? avx512_kernels() : nullptr});
    found.push_back({"avx512_bf16", has_avx512_bf16() ? avx512_bf16_kernels() : nullptr});
    found.push_back({"amx", has_avx512_bf16() && has_amx() ? with_amx(avx512_bf16_kernels()) : nullptr});
#else
    found.push_back({"avx2", nullptr});
    found.push_back({"avx512", nullptr});
    found.push_back({"avx512_bf16", nullptr});
    found.push_back({"amx", nullptr});
#endif
    return found;
  }();
  return all;
}

}  // namespace

const std::vector<std::string>& supported_isas() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const Candidate& each : candidates()) {
      if (each.table && each.offered) found.emplace_back(each.name);
    }
    return found;
  }();
  return names;
}

const KernelTable* select_kernels(const std::string& isa) {
  const std::string wanted = isa == "auto" ? supported_isas().back() : isa;
  std::string known = "auto";
  for (const Candidate& each : candidates()) {
    if (each.offered) known += std::string(", ") + each.name;
    if (wanted != each.name) continue;
    if (each.table) return each.table;
    throw std::runtime_error("this machine does not have the instruction set '" + isa + "'");
  }
  throw std::invalid_argument("unknown instruction set '" + isa + "': choose one of " + known);
}

}  // namespace dualpace
