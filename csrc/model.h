// The weights of one decoder of the Llama family, packed once when they are loaded.
//
// Knows names and shapes of tensors; does not run anything.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels.h"
#include "linear.h"
#include "memory.h"
#include "thread_pool.h"

namespace dualpace {

struct ModelConfig {
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float rms_norm_eps = 0.0f;
  std::vector<float> inv_freq;  // [head_dim / 2]
  bool tie_embeddings = false;
  bool qkv_bias = false;
  bool qk_norm = false;
  DType dtype = kFloat32;  // of weights and KV cache

  int q_size() const { return num_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
  int group() const { return num_heads / num_kv_heads; }
};

// `config`; throws std::invalid_argument for dimensions that cannot work.
const ModelConfig& checked(const ModelConfig& config);

struct Layer {
  Linear qkv;      // columns: q, k, v
  Linear o;
  Linear gate_up;  // panels of 16 in turn
  Linear down;
  float* input_norm = nullptr;
  float* post_norm = nullptr;
  float* q_norm = nullptr;  // [head_dim], with qk_norm
  float* k_norm = nullptr;
};

class Model {
 public:
  // Throws what `checked` throws.
  explicit Model(const ModelConfig& config);

  // Stores one tensor; `layer` is -1 for the tensors outside the layers. Names: embed_tokens, norm,
  // lm_head; and of a layer: input_norm, q_proj, k_proj, v_proj, q_bias, k_bias, v_bias, q_norm,
  // k_norm, o_proj, post_norm, gate_proj, up_proj, down_proj. `shape` is [out, in] or [n]. Throws
  // std::invalid_argument for an unknown, repeated or wrongly shaped tensor.
  void load(const std::string& name, int layer, const Source& source,
            const std::vector<size_t>& shape, ThreadPool& pool);

  // "layers.3.q_proj" and so on: what has not been loaded yet.
  std::vector<std::string> missing() const;

  // out[hidden_size] = embedding of a token.
  void embed(int token, float* out) const;

  const ModelConfig& config() const { return config_; }
  const Mapping& memory() const { return memory_; }
  const Layer& layer(int index) const { return layers_[static_cast<size_t>(index)]; }
  const float* norm() const { return norm_; }
  const Linear& head() const { return head_; }

 private:
  // Where a tensor goes: rows of a packed linear layer, or plain values.
  struct Slot {
    std::string name;
    int layer;
    int rows;             // 0: a vector of `columns` values
    int columns;
    Linear* linear;       // of a matrix; null for the plain embedding
    int column;           // first output column
    int interleave, offset;
    float* vector;
    bool loaded;
  };

  Linear make_linear(int n, int k, bool bias);
  void add_matrix(const char* name, int layer, Linear& linear, int rows, int column = 0,
                  int interleave = 1, int offset = 0);
  void add_vector(const char* name, int layer, float* values, int count);

  ModelConfig config_;
  Mapping memory_;
  std::vector<Layer> layers_;
  float* norm_ = nullptr;
  Linear head_;
  char* embedding_ = nullptr;  // [vocab][hidden] row-major; null when tied to the head
  std::vector<Slot> slots_;
};

}  // namespace dualpace
