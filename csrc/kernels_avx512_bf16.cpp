// Kernels for AVX-512 with BF16: bfloat16 activations meet bfloat16 weights in dot products.
//
// The instructions round sums their own way and take denormal numbers for zero. Attention is that of
// plain AVX-512: dot products would round the queries, which costs more accuracy than all other
// rounding, and hardly save time where memory is what attention waits for.
#include "elementwise_avx512.h"
#include "linear_avx512.h"

namespace dualpace {
namespace {

struct DotWeights {
  typedef uint16_t Element;
  typedef uint16_t Activation;
  typedef __m512i Vector;
  static constexpr int kParts = 1;
  static inline __m512i weight(const uint16_t* w, int) { return _mm512_load_si512(w); }
  static inline __m512i activation(const uint16_t* a, int) {
    int pair;
    __builtin_memcpy(&pair, a, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static inline __m512 add(__m512 sum, __m512i a, __m512i w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)w);
  }
};

struct Rounding {
  static inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
};

const KernelTable kTable = {
    "avx512_bf16",
    {kFloat32, kBFloat16},
    {linear<Fp32Weights>, linear<DotWeights>},
    {swiglu_fp32, swiglu_bf16<Rounding>},
    rms_norm,
    rope,
    {store_fp32, store_bf16<Rounding>},
    {avx512::attention_fp32, avx512::attention_bf16},
};

}  // namespace

const KernelTable* avx512_bf16_kernels() { return &kTable; }

}  // namespace dualpace
