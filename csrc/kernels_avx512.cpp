// Kernels for AVX-512: linear layers, element-wise operations, and the table of all.
#include "elementwise_avx512.h"
#include "linear_avx512.h"

namespace dualpace {
namespace {

struct WidenedWeights {
  typedef uint16_t Element;
  typedef float Activation;
  typedef __m512 Vector;
  static constexpr int kParts = 2;
  static inline __m512 weight(const uint16_t* w, int part) {
    const __m512i words = _mm512_load_si512(w);
    return part == 0 ? widen_even(words) : widen_odd(words);
  }
  static inline __m512 activation(const float* a, int part) { return _mm512_set1_ps(a[part]); }
  static inline __m512 add(__m512 sum, __m512 a, __m512 w) { return _mm512_fmadd_ps(a, w, sum); }
};

// Sixteen floats to bfloat16, nearest even; a NaN stays one.
struct Rounding {
  static inline __m256i to_bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
  }
};

const KernelTable kTable = {
    "avx512",
    {kFloat32, kFloat32},
    {linear<Fp32Weights>, linear<WidenedWeights>},
    {swiglu_fp32, swiglu_bf16<Rounding>},
    rms_norm,
    rope,
    {store_fp32, store_bf16<Rounding>},
    {avx512::attention_fp32, avx512::attention_bf16},
};

}  // namespace

const KernelTable* avx512_kernels() { return &kTable; }

}  // namespace dualpace
