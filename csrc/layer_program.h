// One iteration: a token for each row, through all layers, to the next token of those that sample.
//
// The one place that knows the order of operations of a decoder layer. Does not know instruction
// sets (kernels.h) or Python.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "attention.h"
#include "decode_row.h"
#include "memory.h"
#include "model.h"
#include "sampler.h"
#include "thread_pool.h"

namespace dualpace {

class LayerProgram {
 public:
  LayerProgram(const Model& model, ThreadPool& pool, const KernelTable& kernels)
      : model_(model), pool_(pool), kernels_(kernels) {}

  // Runs `rows` over the KV pages in `arena` (num_pages of `page_tokens` tokens each) and writes the
  // next token of the first `sampled`; if `logits` is not null also their raw logits
  // [sampled][vocab_size]. Rows may be tokens of one request: each sees those before it, because a
  // layer's K and V are all written before anybody attends. So a prompt is as many rows, of which
  // the last one samples. Throws std::invalid_argument, before anything is touched, for a token,
  // position or page out of range. Concurrent callers take turns.
  void run(const std::vector<DecodeRow>& rows, int sampled, char* arena, int64_t num_pages,
           int page_tokens, int32_t* next_tokens, float* logits);

 private:
  void reserve(int num_rows, int sampled);
  void iterate(const std::vector<DecodeRow>& rows, int sampled, char* arena, int32_t* next_tokens,
               float* logits, int thread);
  void append_kv(const Layer& layer, int index, char* arena, int row);

  const Model& model_;
  ThreadPool& pool_;
  const KernelTable& kernels_;
  std::mutex turn_;

  CacheShape cache_;
  CacheRows cache_rows_;
  AttentionPlan plan_;
  std::vector<Sampler> samplers_;  // one per thread

  // Activations, one row per token. What lies behind the features of a row stays zero.
  struct Rows {
    HugeFloats values;
    DType dtype = kFloat32;
    size_t stride = 0;  // in elements of `dtype`
    void resize(int count, size_t row_stride, DType element = kFloat32);
    char* data() { return reinterpret_cast<char*>(values.data()); }
    char* raw(int row) { return data() + static_cast<size_t>(row) * stride * element_bytes(dtype); }
    float* row(int index) { return values.data() + static_cast<size_t>(index) * stride; }
  };
  // normed_, attended_ and hidden_ go into linear layers, in the type that the kernels take.
  Rows residual_, normed_, qkv_, attended_, hidden_, logits_, cosine_, sine_;
  std::vector<HugeFloats> tiles_;  // per thread: a normed row, or gate and up columns
  TileScratch scratch_;
  int capacity_ = 0;         // rows
  int logits_capacity_ = 0;  // rows that sample
};

}  // namespace dualpace
