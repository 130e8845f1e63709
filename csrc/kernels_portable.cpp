// Kernels in plain C++, for any architecture and as the twin that the fast ones are tested against.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace dualpace {
namespace {

struct Float32 {
  typedef float Element;
  static float load(const float* p) { return *p; }
  static void store(float* p, float x) { *p = x; }
  // The weights of 16 columns at k and k + 1, k even.
  static void pair(const void* panel, int k, float* even, float* odd) {
    const float* w = static_cast<const float*>(panel) + k * kPanel;
    memcpy(even, w, kPanel * sizeof(float));
    memcpy(odd, w + kPanel, kPanel * sizeof(float));
  }
};

struct BFloat16 {
  typedef uint16_t Element;
  static float load(const uint16_t* p) {
    const uint32_t bits = static_cast<uint32_t>(*p) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  static void store(uint16_t* p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) {
      *p = static_cast<uint16_t>((bits >> 16) | 0x40u);  // stay a NaN: rounding could carry to inf
    } else {
      *p = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
  }
  static void pair(const void* panel, int k, float* even, float* odd) {
    const uint16_t* w = static_cast<const uint16_t*>(panel) + k * kPanel;
    uint32_t low[kPanel], high[kPanel];
    for (int j = 0; j < kPanel; ++j) {
      low[j] = static_cast<uint32_t>(w[2 * j]) << 16;
      high[j] = static_cast<uint32_t>(w[2 * j + 1]) << 16;
    }
    memcpy(even, low, sizeof low);
    memcpy(odd, high, sizeof high);
  }
};

// R rows at a time, so that widened weights are used more than once.
template <class T, int R>
void linear_rows(const float* a, size_t lda, int k, const void* panel, const float* bias, float* c,
                 size_t ldc, int accumulate) {
  float sum[R][kPanel] = {};
  for (int i = 0; i < k; i += 2) {
    float even[kPanel], odd[kPanel];
    T::pair(panel, i, even, odd);
    for (int r = 0; r < R; ++r) {
      const float x = a[r * lda + i], y = a[r * lda + i + 1];
      for (int j = 0; j < kPanel; ++j) sum[r][j] += x * even[j] + y * odd[j];
    }
  }
  for (int r = 0; r < R; ++r) {
    float* y = c + r * ldc;
    for (int j = 0; j < kPanel; ++j) {
      y[j] = sum[r][j] + (bias ? bias[j] : 0.0f) + (accumulate ? y[j] : 0.0f);
    }
  }
}

template <class T>
void linear(const LinearArgs* args) {
  const size_t k_pad = static_cast<size_t>((args->k + kAlignK - 1) / kAlignK * kAlignK);
  for (int p = 0; p < args->num_panels; ++p) {
    const char* panel =
        args->panels + static_cast<size_t>(p) * k_pad * kPanel * sizeof(typename T::Element);
    const float* bias = args->bias ? args->bias + p * kPanel : nullptr;
    const float* a = static_cast<const float*>(args->a);
    float* c = args->c + p * kPanel;
    int row = 0;
    for (; row + 4 <= args->m; row += 4) {
      linear_rows<T, 4>(a + row * args->lda, args->lda, args->k, panel, bias, c + row * args->ldc,
                        args->ldc, args->accumulate);
    }
    for (; row < args->m; ++row) {
      linear_rows<T, 1>(a + row * args->lda, args->lda, args->k, panel, bias, c + row * args->ldc,
                        args->ldc, args->accumulate);
    }
  }
}

template <class T>
void swiglu(const float* x, size_t ldx, int m, void* out, size_t ldo) {
  typename T::Element* y = static_cast<typename T::Element*>(out);
  for (int row = 0; row < m; ++row) {
    for (int j = 0; j < kPanel; ++j) {
      const float g = x[row * ldx + j];
      T::store(y + row * ldo + j, g / (1.0f + expf(-g)) * x[row * ldx + kPanel + j]);
    }
  }
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

void rope(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

template <class T>
void store(const float* x, int n, void* dst) {
  typename T::Element* y = static_cast<typename T::Element*>(dst);
  for (int i = 0; i < n; ++i) T::store(y + i, x[i]);
}

template <class T>
void attention(const AttentionArgs* args) {
  typedef typename T::Element Element;
  const int d = args->head_dim;
  float* scores = args->scratch;
  for (int h = 0; h < args->group; ++h) {
    const float* q = args->query + h * d;
    float* out = args->out + h * d;
    float maximum = -INFINITY, sum = 0.0f;
    for (int i = 0; i < d; ++i) out[i] = 0.0f;
    for (int64_t t = args->begin; t < args->end;) {
      const int64_t slot = t % args->page_tokens;
      const size_t page = static_cast<size_t>(args->pages[t / args->page_tokens]);
      int64_t count = args->page_tokens - slot;
      if (count > args->end - t) count = args->end - t;
      if (count > kTileTokens) count = kTileTokens;
      const Element* key =
          reinterpret_cast<const Element*>(args->keys + page * args->page_stride) + slot * d;
      const Element* value =
          reinterpret_cast<const Element*>(args->values + page * args->page_stride) + slot * d;

      float top = maximum;
      for (int64_t j = 0; j < count; ++j) {
        float s = 0.0f;
        for (int i = 0; i < d; ++i) s += q[i] * T::load(key + j * d + i);
        scores[j] = s * args->scale;
        if (scores[j] > top) top = scores[j];
      }
      const float fade = maximum == -INFINITY ? 0.0f : expf(maximum - top);
      sum *= fade;
      for (int i = 0; i < d; ++i) out[i] *= fade;
      for (int64_t j = 0; j < count; ++j) {
        const float p = expf(scores[j] - top);
        sum += p;
        for (int i = 0; i < d; ++i) out[i] += p * T::load(value + j * d + i);
      }
      maximum = top;
      t += count;
    }
    if (args->maxima) {
      args->maxima[h] = maximum;
      args->sums[h] = sum;
    } else {
      for (int i = 0; i < d; ++i) out[i] /= sum;
    }
  }
}

const KernelTable kTable = {
    "portable",
    {kFloat32, kFloat32},
    {linear<Float32>, linear<BFloat16>},
    {swiglu<Float32>, swiglu<BFloat16>},
    rms_norm,
    rope,
    {store<Float32>, store<BFloat16>},
    {attention<Float32>, attention<BFloat16>},
};

}  // namespace

const KernelTable* portable_kernels() { return &kTable; }

}  // namespace dualpace
