#include "dispatch.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
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
#endif

struct Candidate {
  const char* name;
  const KernelTable* table;  // null: not built for this architecture, or not supported here
};

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = [] {
    std::vector<Candidate> found{{"portable", portable_kernels()}};
#if defined(DUALPACE_HAVE_AVX2)
    found.push_back({"avx2", has_avx2() ? avx2_kernels() : nullptr});
#else
    found.push_back({"avx2", nullptr});
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
      if (each.table) found.emplace_back(each.name);
    }
    return found;
  }();
  return names;
}

const KernelTable* select_kernels(const std::string& isa) {
  const std::string wanted = isa == "auto" ? supported_isas().back() : isa;
  std::string known = "auto";
  for (const Candidate& each : candidates()) {
    known += std::string(", ") + each.name;
    if (wanted != each.name) continue;
    if (each.table) return each.table;
    throw std::runtime_error("this machine does not have the instruction set '" + isa + "'");
  }
  throw std::invalid_argument("unknown instruction set '" + isa + "': choose one of " + known);
}

}  // namespace dualpace
