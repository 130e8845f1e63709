// Paged attention for AVX-512, in float arithmetic.
#include "attention_avx512.h"

namespace dualpace {
namespace {

struct Floats32 {
  __m512 a, b;
};

// Queries are floats in the order that stored keys widen into.
template <class Values>
struct WidenedCache : Values {
  typedef float Query;
  static inline void add(__m512* sum, const float* q, typename Values::Words words) {
    __m512 a, b;
    Values::widen(words, &a, &b);
    *sum = _mm512_fmadd_ps(a, _mm512_load_ps(q), *sum);
    *sum = _mm512_fmadd_ps(b, _mm512_load_ps(q + 16), *sum);
  }
  static inline void query(const float* x, int n, float* q) {
    const __mmask32 mask = first32(n);
    __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
    __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16);
    Values::disorder(&a, &b);
    _mm512_store_ps(q, a);
    _mm512_store_ps(q + 16, b);
  }
};

struct SplitBf16Values : Bf16Values {
  static inline void disorder(__m512* a, __m512* b) { deinterleave(a, b); }
};

struct Fp32Values {
  typedef float Element;
  typedef Floats32 Words;
  static inline Floats32 load(const float* p) {
    return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)};
  }
  static inline Floats32 load_some(const float* p, int n) {
    const __mmask32 mask = first32(n);
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p),
            _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + 16)};
  }
  static inline void widen(Floats32 words, __m512* a, __m512* b) {
    *a = words.a;
    *b = words.b;
  }
  static inline void order(__m512*, __m512*) {}
  static inline void disorder(__m512*, __m512*) {}
};

}  // namespace

namespace avx512 {

void attention_fp32(const AttentionArgs* args) { attention<WidenedCache<Fp32Values>>(args); }
void attention_bf16(const AttentionArgs* args) { attention<WidenedCache<SplitBf16Values>>(args); }

}  // namespace avx512
}  // namespace dualpace
