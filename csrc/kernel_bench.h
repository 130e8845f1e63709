// Timing loops around the kernels, as the layer program calls them: what `dualpace bench kernels`
// runs. All times are seconds, from a barrier of all threads to the next.
//
// Knows kernels, threads and raw memory; does not know which cases are worth measuring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "engine.h"
#include "memory.h"
#include "linear.h"

namespace dualpace {

// Fills memory with random bfloat16 numbers of magnitudes from 2^-7 to 2^-3, or, with `wide`, from
// 2^-3 to 2.
void fill_bfloat16(ThreadPool& pool, char* base, size_t bytes, bool wide);

// All threads read [base, base + bytes) once with the widest loads there are, each its own part.
double time_read(ThreadPool& pool, const char* base, size_t bytes);

// One barrier, as the mean of `rounds`.
double time_barrier(ThreadPool& pool, int rounds);

// Sampling `rows` rows of random logits at temperature 0.8, top_p 0.95.
double time_sampling(ThreadPool& pool, int rows, int vocab);

// A linear layer, plain or gate_up with SwiGLU, of bfloat16 weights that lie anywhere.
class LinearBench {
 public:
  // n: output columns; of gate and up together with `swiglu`, then a multiple of 32.
  LinearBench(Engine& engine, int n, int k, bool swiglu);

  size_t weight_bytes() const { return packed_bytes(n_, k_, kBFloat16); }
  int outputs() const { return swiglu_ ? n_ / 2 : n_; }

  void set_input(const float* x, int m);         // [m][k]
  double run(char* weights);                     // weight_bytes() of packed weights
  void output(float* out) const;                 // [m][outputs()] of the last run
  void weight_row(char* weights, int row, float* out) const;  // [k]

 private:
  Linear layer(char* weights) const;

  Engine& engine_;
  int n_, k_, m_ = 0;
  bool swiglu_;
  DType activation_;
  size_t in_stride_, out_stride_;
  HugeFloats in_, out_;  // of the activation type, but the plain layer's output is float
  std::vector<HugeFloats> tiles_;
  TileScratch scratch_;
};

// Paged attention of one batch over the layers of an arena.
class AttentionBench {
 public:
  // query: [rows][kv_head][group][head_dim]. pages[row] must stay valid.
  AttentionBench(Engine& engine, const CacheShape& shape, int group, CacheRows rows,
                 const float* query);

  double run(const char* arena, int layer);
  const std::vector<float>& output() const { return out_; }  // shaped like the query

 private:
  Engine& engine_;
  CacheShape shape_;
  CacheRows rows_;
  AttentionPlan plan_;
  size_t stride_;
  std::vector<float> query_, out_;
};

}  // namespace dualpace
