#include "model.h"

#include <cstring>
#include <stdexcept>

namespace dualpace {
namespace {

constexpr size_t kLineBytes = 64;

size_t lines(size_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

size_t vector_bytes(int count) {
  return lines(static_cast<size_t>(round_up(count, kPanel)) * sizeof(float));
}

// Both gate and up get whole panels, so that they can alternate.
int gate_up_columns(const ModelConfig& c) { return 2 * round_up(c.intermediate_size, kPanel); }

size_t total_bytes(const ModelConfig& c) {
  const auto matrix = [&](int n, int k) { return packed_bytes(n, k, c.dtype); };
  const int qkv = c.q_size() + 2 * c.kv_size();
  const size_t layer = matrix(qkv, c.hidden_size) + vector_bytes(qkv) +
                       matrix(c.hidden_size, c.q_size()) +
                       matrix(gate_up_columns(c), c.hidden_size) +
                       matrix(c.hidden_size, c.intermediate_size) +
                       2 * vector_bytes(c.hidden_size) + 2 * vector_bytes(c.head_dim);
  const size_t embedding = lines(static_cast<size_t>(c.vocab_size) *
                                 static_cast<size_t>(c.hidden_size) * element_bytes(c.dtype));
  return static_cast<size_t>(c.num_layers) * layer + matrix(c.vocab_size, c.hidden_size) +
         vector_bytes(c.hidden_size) + (c.tie_embeddings ? 0 : embedding);
}

std::string full_name(const std::string& name, int layer) {
  return layer < 0 ? name : "layers." + std::to_string(layer) + "." + name;
}

}  // namespace

const ModelConfig& checked(const ModelConfig& c) {
  const auto require = [](bool ok, const char* rule) {
    if (!ok) throw std::invalid_argument(std::string("model dimensions: ") + rule);
  };
  require(c.vocab_size > 0 && c.hidden_size > 0 && c.intermediate_size > 0 && c.num_layers > 0,
          "all sizes must be positive");
  require(c.num_kv_heads > 0 && c.num_heads > 0 && c.num_heads % c.num_kv_heads == 0,
          "num_heads must be a multiple of num_kv_heads");
  require(c.head_dim > 0 && c.head_dim % 2 == 0, "head_dim must be even");
  require(c.inv_freq.size() == static_cast<size_t>(c.head_dim) / 2,
          "inv_freq must have head_dim / 2 values");
  return c;
}

Model::Model(const ModelConfig& config)
    : config_(checked(config)), memory_(total_bytes(config)) {
  const ModelConfig& c = config_;
  const auto take_vector = [&](int count) {
    return reinterpret_cast<float*>(memory_.take(vector_bytes(count)));
  };
  layers_.resize(static_cast<size_t>(c.num_layers));
  for (int i = 0; i < c.num_layers; ++i) {
    Layer& layer = layers_[static_cast<size_t>(i)];
    layer.input_norm = take_vector(c.hidden_size);
    add_vector("input_norm", i, layer.input_norm, c.hidden_size);
    layer.qkv = make_linear(c.q_size() + 2 * c.kv_size(), c.hidden_size, c.qkv_bias);
    add_matrix("q_proj", i, layer.qkv, c.q_size());
    add_matrix("k_proj", i, layer.qkv, c.kv_size(), c.q_size());
    add_matrix("v_proj", i, layer.qkv, c.kv_size(), c.q_size() + c.kv_size());
    if (c.qkv_bias) {
      add_vector("q_bias", i, layer.qkv.bias, c.q_size());
      add_vector("k_bias", i, layer.qkv.bias + c.q_size(), c.kv_size());
      add_vector("v_bias", i, layer.qkv.bias + c.q_size() + c.kv_size(), c.kv_size());
    }
    if (c.qk_norm) {
      layer.q_norm = take_vector(c.head_dim);
      layer.k_norm = take_vector(c.head_dim);
      add_vector("q_norm", i, layer.q_norm, c.head_dim);
      add_vector("k_norm", i, layer.k_norm, c.head_dim);
    }
    layer.o = make_linear(c.hidden_size, c.q_size(), false);
    add_matrix("o_proj", i, layer.o, c.hidden_size);
    layer.post_norm = take_vector(c.hidden_size);
    add_vector("post_norm", i, layer.post_norm, c.hidden_size);
    layer.gate_up = make_linear(gate_up_columns(c), c.hidden_size, false);
    add_matrix("gate_proj", i, layer.gate_up, c.intermediate_size, 0, 2, 0);
    add_matrix("up_proj", i, layer.gate_up, c.intermediate_size, 0, 2, 1);
    layer.down = make_linear(c.hidden_size, c.intermediate_size, false);
    add_matrix("down_proj", i, layer.down, c.hidden_size);
  }
  norm_ = take_vector(c.hidden_size);
  add_vector("norm", -1, norm_, c.hidden_size);
  head_ = make_linear(c.vocab_size, c.hidden_size, false);
  add_matrix(c.tie_embeddings ? "embed_tokens" : "lm_head", -1, head_, c.vocab_size);
  if (!c.tie_embeddings) {
    embedding_ = memory_.take(static_cast<size_t>(c.vocab_size) *
                              static_cast<size_t>(c.hidden_size) * element_bytes(c.dtype));
    slots_.push_back({"embed_tokens", -1, c.vocab_size, c.hidden_size, nullptr, 0, 1, 0, nullptr,
                      false});
  }
}

Linear Model::make_linear(int n, int k, bool bias) {
  Linear linear;
  linear.n = n;
  linear.k = k;
  linear.dtype = config_.dtype;
  linear.panels = memory_.take(packed_bytes(n, k, config_.dtype));
  if (bias) linear.bias = reinterpret_cast<float*>(memory_.take(vector_bytes(n)));
  return linear;
}

void Model::add_matrix(const char* name, int layer, Linear& linear, int rows, int column,
                       int interleave, int offset) {
  slots_.push_back(
      {name, layer, rows, linear.k, &linear, column, interleave, offset, nullptr, false});
}

void Model::add_vector(const char* name, int layer, float* values, int count) {
  slots_.push_back({name, layer, 0, count, nullptr, 0, 1, 0, values, false});
}

void Model::load(const std::string& name, int layer, const Source& source,
                 const std::vector<size_t>& shape, ThreadPool& pool) {
  Slot* slot = nullptr;
  for (Slot& each : slots_) {
    if (each.layer == layer && each.name == name) slot = &each;
  }
  if (slot == nullptr) throw std::invalid_argument("unknown tensor " + full_name(name, layer));
  if (slot->loaded) throw std::invalid_argument("tensor given twice: " + full_name(name, layer));
  std::vector<size_t> wanted{static_cast<size_t>(slot->columns)};
  if (slot->rows > 0) wanted.insert(wanted.begin(), static_cast<size_t>(slot->rows));
  if (shape != wanted) throw std::invalid_argument("wrong shape of " + full_name(name, layer));

  if (slot->vector) {
    for (int i = 0; i < slot->columns; ++i) slot->vector[i] = source.at(static_cast<size_t>(i));
  } else {
    pool.run([&](int thread) {
      const Range mine = share(slot->rows, thread, pool.size());
      if (slot->linear) {
        pack_rows(*slot->linear, source, mine.begin, mine.end, slot->column, slot->interleave,
                  slot->offset);
        return;
      }
      const KernelTable& portable = *portable_kernels();
      const size_t width = static_cast<size_t>(slot->columns);
      for (size_t i = static_cast<size_t>(mine.begin) * width;
           i < static_cast<size_t>(mine.end) * width; ++i) {
        const float x = source.at(i);
        portable.store[config_.dtype](&x, 1, embedding_ + i * element_bytes(config_.dtype));
      }
    });
  }
  slot->loaded = true;
}

std::vector<std::string> Model::missing() const {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (!slot.loaded) names.push_back(full_name(slot.name, slot.layer));
  }
  return names;
}

void Model::embed(int token, float* out) const {
  if (embedding_ == nullptr) {
    unpack_row(head_, token, out);
    return;
  }
  const Source rows{embedding_, config_.dtype};
  const size_t width = static_cast<size_t>(config_.hidden_size);
  for (size_t i = 0; i < width; ++i) out[i] = rows.at(static_cast<size_t>(token) * width + i);
}

}  // namespace dualpace
