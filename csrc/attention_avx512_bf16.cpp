// Paged attention for AVX-512 with BF16: queries are rounded to bfloat16 and meet keys in dot
// products; weights and values stay in float arithmetic.
#include "attention_avx512.h"

namespace dualpace {
namespace {

struct DotCache : Bf16Values {
  typedef uint16_t Query;
  static inline void add(__m512* sum, const uint16_t* q, __m512i words) {
    *sum = _mm512_dpbf16_ps(*sum, (__m512bh)_mm512_load_si512(q), (__m512bh)words);
  }
  static inline void query(const float* x, int n, uint16_t* q) {
    const __mmask32 mask = first32(n);
    const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
    const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16);
    _mm512_store_si512(q, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
};

}  // namespace

namespace avx512_bf16 {

void attention_bf16(const AttentionArgs* args) { attention<DotCache>(args); }

}  // namespace avx512_bf16
}  // namespace dualpace
