// The Python face of the engine: checks what comes in, lets go of the GIL, and runs.
//
// Arrays are NumPy arrays with the shapes and types written at each function; bfloat16 travels as
// uint16. Wrong values raise ValueError, a missing instruction set RuntimeError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "assist_program.h"
#include "bindings.h"
#include "bindings_mailbox.h"
#include "bindings_sampling.h"
#include "engine.h"
#include "layer_program.h"
#include "memory.h"

using namespace nanobind::literals;

namespace dualpace {
namespace {

// The kernels alone, which is how they are tested.

void linear(Engine& engine, const In<float, 2>& x, const AnyIn& weight,
            const std::optional<In<float, 1>>& bias, const Out<float, 2>& out) {
  const Source source = source_of(weight);
  require(weight.ndim() == 2 && weight.shape(1) == x.shape(1), "weight must be [out, in]");
  const size_t m = x.shape(0), k = x.shape(1), n = weight.shape(0);
  require(m > 0 && k > 0 && n > 0 && out.shape(0) == m && out.shape(1) == n,
          "out must be [rows, out]");
  require(!bias || bias->shape(0) == n, "bias must be [out]");
  Linear layer;
  layer.n = static_cast<int>(n);
  layer.k = static_cast<int>(k);
  layer.dtype = source.dtype;
  const size_t columns = static_cast<size_t>(layer.num_panels()) * kPanel;
  Mapping memory(packed_bytes(layer.n, layer.k, layer.dtype) + columns * sizeof(float) + 64);
  layer.panels = memory.take(packed_bytes(layer.n, layer.k, layer.dtype));
  if (bias) {
    layer.bias = reinterpret_cast<float*>(memory.take(columns * sizeof(float)));
    std::copy_n(bias->data(), n, layer.bias);
  }
  const DType type = engine.kernels().activations[layer.dtype];
  const size_t stride = activation_stride(layer.k);
  std::vector<float> a(m * stride), c(m * columns);
  for (size_t i = 0; i < m; ++i) {
    engine.kernels().store[type](
        x.data() + i * k, layer.k,
        reinterpret_cast<char*>(a.data()) + i * stride * element_bytes(type));
  }
  TileScratch scratch;
  scratch.reserve(engine.kernels(), static_cast<int>(m), layer.k, layer.n);
  {
    const nb::gil_scoped_release release;
    engine.pool().run([&](int thread) {
      const Range mine = share(layer.n, thread, engine.pool().size());
      pack_rows(layer, source, mine.begin, mine.end, 0, 1, 0);
      engine.pool().barrier();
      run_linear(engine.kernels(), layer, a.data(), stride, static_cast<int>(m), c.data(), columns,
                 false, scratch, engine.pool());
    });
  }
  for (size_t i = 0; i < m; ++i) std::copy_n(c.data() + i * columns, n, out.data() + i * n);
}

void rms_norm(Engine& engine, const In<float, 2>& x, const In<float, 1>& weight, float eps,
              const Out<float, 2>& out) {
  const size_t m = x.shape(0), n = x.shape(1);
  require(weight.shape(0) == n && out.shape(0) == m && out.shape(1) == n, "shapes differ");
  for (size_t i = 0; i < m; ++i) {
    engine.kernels().rms_norm(x.data() + i * n, weight.data(), eps, static_cast<int>(n),
                              out.data() + i * n);
  }
}

void rope(Engine& engine, const Out<float, 2>& x, const In<float, 1>& cosine,
          const In<float, 1>& sine) {
  const size_t half = cosine.shape(0);
  require(x.shape(1) == 2 * half && sine.shape(0) == half, "shapes differ");
  for (size_t i = 0; i < x.shape(0); ++i) {
    engine.kernels().rope(x.data() + i * 2 * half, cosine.data(), sine.data(),
                          static_cast<int>(half));
  }
}

void attention(Engine& engine, const In<float, 3>& query, nb::handle arena,
               const std::string& dtype, int num_layers, int layer, int num_kv_heads,
               int page_tokens, const In<int64_t, 1>& positions,
               const In<int64_t, 1>& page_offsets, const In<int32_t, 1>& pages,
               const Out<float, 3>& out) {
  const size_t m = query.shape(0);
  const int heads = static_cast<int>(query.shape(1)), dim = static_cast<int>(query.shape(2));
  require(num_kv_heads > 0 && heads % num_kv_heads == 0 && page_tokens > 0 && layer >= 0 &&
              layer < num_layers && positions.shape(0) == m && out.size() == query.size(),
          "shapes differ");
  const CacheShape shape{num_layers, num_kv_heads, page_tokens, dim, parse_dtype(dtype)};
  const Ragged table(page_offsets, pages, m, "pages");
  const Buffer memory(arena);
  const int64_t num_pages = static_cast<int64_t>(memory.size() / shape.page_bytes());
  CacheRows rows;
  for (size_t i = 0; i < m; ++i) {
    require(positions(i) >= 0 && positions(i) / page_tokens < table.length(i),
            "position out of range");
    for (int64_t p = 0; p < table.length(i); ++p) {
      require(table.begin(i)[p] >= 0 && table.begin(i)[p] < num_pages, "page id out of range");
    }
    rows.positions.push_back(positions(i));
    rows.pages.push_back(table.begin(i));
  }
  const size_t stride = static_cast<size_t>(heads * dim);
  const nb::gil_scoped_release release;
  AttentionPlan plan;
  plan.build(rows, {heads / num_kv_heads, num_kv_heads, dim}, page_tokens, engine.pool().size());
  const AttentionQueries queries{query.data(), stride, kFloat32};
  const AttentionOut to{out.data(), stride, kFloat32};
  engine.pool().run([&](int thread) {
    plan.attend(engine.kernels(), shape, memory.data(), layer, rows, queries, {}, to, thread,
                engine.pool());
    engine.pool().barrier();
    plan.merge(engine.kernels(), to, thread, engine.pool().size());
  });
}

void sample(Engine& engine, const In<float, 2>& logits, const In<int64_t, 1>& positions,
            const SamplingArrays& sampling, const Out<int32_t, 1>& out,
            const std::optional<Out<double, 2>>& logprobs) {
  const size_t m = logits.shape(0), vocab = logits.shape(1);
  require(vocab > 0 && sampling.size() == m && positions.shape(0) == m && out.shape(0) == m,
          "shapes differ");
  std::vector<SamplingRow> rows = sampling.rows(static_cast<int>(vocab), logprobs);
  for (size_t i = 0; i < m; ++i) rows[i].position = positions(i);
  std::vector<float> scores(logits.data(), logits.data() + m * vocab);
  std::vector<Sampler> samplers(static_cast<size_t>(engine.pool().size()));
  for (Sampler& sampler : samplers) sampler.reserve(static_cast<int>(vocab));
  const nb::gil_scoped_release release;
  engine.pool().run([&](int thread) {
    const Range mine = share(static_cast<int>(m), thread, engine.pool().size());
    for (int i = mine.begin; i < mine.end; ++i) {
      const size_t row = static_cast<size_t>(i);
      out.data()[row] = samplers[static_cast<size_t>(thread)].sample(
          scores.data() + row * vocab, static_cast<int>(vocab), rows[row]);
    }
  });
}

// A mapping as an array of bytes that keeps it alive.
template <class Owner>
nb::object as_array(char* base, size_t size, std::unique_ptr<Owner> owner) {
  const nb::capsule keep(owner.release(), [](void* p) noexcept { delete static_cast<Owner*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(base, {size}, keep));
}

struct SharedMapping {
  SharedMapping(int descriptor, size_t bytes) : base(map_shared(descriptor, bytes)), size(bytes) {}
  ~SharedMapping() { unmap_shared(base, size); }
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  char* base;
  size_t size;
};

nb::object map_shared_array(int descriptor, size_t bytes) {
  auto mapping = std::make_unique<SharedMapping>(descriptor, bytes);
  char* base = mapping->base;
  return as_array(base, bytes, std::move(mapping));
}

nb::object map_private_array(size_t bytes) {
  auto mapping = std::make_unique<Mapping>(bytes);
  char* base = mapping->take(bytes);
  return as_array(base, bytes, std::move(mapping));
}

std::string prepare(Engine& engine, nb::handle buffer, size_t offset, size_t length) {
  const Buffer memory(buffer);
  require(offset <= memory.size() && length <= memory.size() - offset, "range outside the buffer");
  const nb::gil_scoped_release release;
  return prepare_arena(engine.pool(), memory.data() + offset, length);
}

std::string pages_of(nb::handle buffer) {
  const Buffer memory(buffer);
  return describe_pages(memory.data(), memory.size());
}

// A model with its weights, or the shape of one whose dense part the GPU engine computes.
class NativeModel {
 public:
  NativeModel(Engine& engine, const ModelConfig& config, bool with_weights)
      : engine_(engine), config_(checked(config)), assist_(config_, engine.pool(), engine.kernels()) {
    if (!with_weights) return;
    model_ = std::make_unique<Model>(config);
    program_ = std::make_unique<LayerProgram>(*model_, engine.pool(), engine.kernels());
  }

  void load(const std::string& name, int layer, const AnyIn& array) {
    require(model_ != nullptr, "the model is without weights");
    const Source source = source_of(array);
    std::vector<size_t> shape;
    for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
    const nb::gil_scoped_release release;
    model_->load(name, layer, source, shape, engine_.pool());
    complete_ = model_->missing().empty();
  }

  std::vector<std::string> missing() const {
    return model_ ? model_->missing() : std::vector<std::string>();
  }

  size_t weight_bytes() const { return model_ ? model_->memory().used() : 0; }
  std::string weight_pages() const {
    return model_ ? describe_pages(model_->memory().data(), weight_bytes()) : "no pages";
  }

  void decode(nb::handle arena, int page_tokens, const In<int32_t, 1>& tokens,
              const In<int64_t, 1>& positions, const In<int64_t, 1>& page_offsets,
              const In<int32_t, 1>& pages, const SamplingArrays& sampling,
              const Out<int32_t, 1>& out, const std::optional<Out<double, 2>>& logprobs,
              const std::optional<Out<float, 2>>& logits) {
    const size_t m = tokens.shape(0), sampled = out.shape(0);
    require(model_ != nullptr, "the host holds no weights: iterations cannot be computed here");
    require(complete_, "the model has not got all its tensors");
    require(sampled <= m && sampling.size() == sampled,
            "one sampling parameter and output per row that samples");
    require(!logits || (logits->shape(0) == sampled &&
                        logits->shape(1) == static_cast<size_t>(config_.vocab_size)),
            "logits must be [sampled rows, vocab_size]");
    std::vector<DecodeRow> rows = rows_of(tokens, positions, page_offsets, pages, page_tokens);
    const std::vector<SamplingRow> rules = sampling.rows(config_.vocab_size, logprobs);
    for (size_t i = 0; i < sampled; ++i) {
      rows[i].sampling = rules[i];
      rows[i].sampling.position = rows[i].position + 1;
    }
    const Buffer memory(arena);
    const nb::gil_scoped_release release;
    program_->run(rows, static_cast<int>(sampled), memory.data(), pages_in(memory, page_tokens),
                  page_tokens, out.data(), logits ? logits->data() : nullptr);
  }

  // The rows of each slot lie behind those of the slot before. Says how it ended.
  std::string decode_assisted(SharedMailbox& mailbox, uint64_t iteration,
                              const std::vector<size_t>& slot_rows,
                              const std::vector<nb::bytes>& rules, nb::handle arena,
                              int page_tokens, const In<int32_t, 1>& tokens,
                              const In<int64_t, 1>& positions, const In<int64_t, 1>& page_offsets,
                              const In<int32_t, 1>& pages, const In<double, 1>& temperatures,
                              const In<uint64_t, 1>& seeds, const Out<int32_t, 1>& out) {
    const size_t m = tokens.shape(0);
    require(temperatures.shape(0) == m && seeds.shape(0) == m && out.shape(0) == m,
            "one temperature, seed and output per row");
    require(slot_rows.size() == rules.size() &&
                std::accumulate(slot_rows.begin(), slot_rows.end(), size_t{0}) == m,
            "every row must be in a slot, and every slot have its rules");
    std::vector<DecodeRow> rows = rows_of(tokens, positions, page_offsets, pages, page_tokens);
    for (size_t i = 0; i < m; ++i) {
      rows[i].sampling.temperature = temperatures(i);
      rows[i].sampling.seed = seeds(i);
    }
    std::vector<MicroBatch> batches;
    auto next = rows.begin();
    for (size_t slot = 0; slot < slot_rows.size(); ++slot) {
      const auto end = next + static_cast<std::ptrdiff_t>(slot_rows[slot]);
      batches.push_back({{next, end}, {rules[slot].c_str(), rules[slot].size()}});
      next = end;
    }
    const Buffer memory(arena);
    const nb::gil_scoped_release release;
    return describe(assist_.run(batches, iteration, mailbox.box, memory.data(),
                                pages_in(memory, page_tokens), page_tokens, out.data()));
  }

 private:
  std::vector<DecodeRow> rows_of(const In<int32_t, 1>& tokens, const In<int64_t, 1>& positions,
                                 const In<int64_t, 1>& page_offsets, const In<int32_t, 1>& pages,
                                 int page_tokens) const {
    const size_t m = tokens.shape(0);
    require(page_tokens > 0, "page_tokens must be positive");
    require(positions.shape(0) == m, "one position per row");
    const Ragged table(page_offsets, pages, m, "pages");
    std::vector<DecodeRow> rows(m);
    for (size_t i = 0; i < m; ++i) {
      rows[i] = {tokens(i), positions(i), table.begin(i), table.length(i), SamplingRow()};
    }
    return rows;
  }

  int64_t pages_in(const Buffer& memory, int page_tokens) const {
    const ModelConfig& c = config_;
    const CacheShape shape{c.num_layers, c.num_kv_heads, page_tokens, c.head_dim, c.dtype};
    return static_cast<int64_t>(memory.size() / shape.page_bytes());
  }

  Engine& engine_;
  const ModelConfig config_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<LayerProgram> program_;
  AssistProgram assist_;
  bool complete_ = false;
};

}  // namespace
}  // namespace dualpace

NB_MODULE(_native, m) {
  using namespace dualpace;
  m.doc() = "DualPace's CPU decode engine.";
  m.def("supported_isas", &supported_isas, "Instruction sets this machine can run, best last.");

  bind_sampling(m);
  nb::class_<Engine>(m, "Engine", "A pinned thread pool and the kernels of one instruction set.")
      .def(nb::init<std::vector<int>, const std::string&>(), "cpu_ids"_a, "isa"_a = "auto",
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("isa", [](const Engine& e) { return std::string(e.kernels().name); })
      .def_prop_ro("num_threads", [](Engine& e) { return e.pool().size(); })
      .def("linear", &linear, "x"_a, "weight"_a, "bias"_a.none(), "out"_a)
      .def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a)
      .def("rope", &rope, "x"_a, "cosine"_a, "sine"_a)
      .def("attention", &attention, "query"_a, "arena"_a, "dtype"_a, "num_layers"_a,
           "layer"_a, "num_kv_heads"_a, "page_tokens"_a, "positions"_a, "page_offsets"_a, "pages"_a,
           "out"_a)
      .def("sample", &sample, "logits"_a, "positions"_a, "sampling"_a, "out"_a,
           "logprobs"_a.none());

  nb::class_<ModelConfig>(m, "ModelConfig", "Dimensions of a model.")
      .def("__init__",
           [](ModelConfig* self, int vocab_size, int hidden_size, int intermediate_size,
              int num_layers, int num_heads, int num_kv_heads, int head_dim, float rms_norm_eps,
              std::vector<float> inv_freq, bool tie_embeddings, bool qkv_bias, bool qk_norm,
              const std::string& dtype) {
             new (self) ModelConfig{vocab_size, hidden_size, intermediate_size, num_layers,
                                    num_heads, num_kv_heads, head_dim, rms_norm_eps,
                                    std::move(inv_freq), tie_embeddings, qkv_bias, qk_norm,
                                    parse_dtype(dtype)};
           },
           nb::kw_only(), "vocab_size"_a, "hidden_size"_a, "intermediate_size"_a, "num_layers"_a,
           "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "rms_norm_eps"_a, "inv_freq"_a,
           "tie_embeddings"_a, "qkv_bias"_a, "qk_norm"_a, "dtype"_a);

  nb::class_<NativeModel>(m, "Model", "Packed weights and the layer program over them.")
      .def(nb::init<Engine&, const ModelConfig&, bool>(), "engine"_a, "config"_a,
           "with_weights"_a = true, nb::keep_alive<1, 2>())
      .def("load", &NativeModel::load, "name"_a, "layer"_a, "array"_a)
      .def("missing", &NativeModel::missing)
      .def_prop_ro("weight_bytes", &NativeModel::weight_bytes)
      .def_prop_ro("weight_pages", &NativeModel::weight_pages)
      .def("decode", &NativeModel::decode, "arena"_a, "page_tokens"_a, "tokens"_a, "positions"_a,
           "page_offsets"_a, "pages"_a, "sampling"_a, "out"_a, "logprobs"_a.none(),
           "logits"_a.none())
      .def("decode_assisted", &NativeModel::decode_assisted, "mailbox"_a, "iteration"_a,
           "slot_rows"_a, "rules"_a, "arena"_a, "page_tokens"_a, "tokens"_a, "positions"_a,
           "page_offsets"_a, "pages"_a, "temperatures"_a, "seeds"_a, "out"_a);

  m.def("map_shared", &map_shared_array, "descriptor"_a, "size"_a,
        "The first `size` bytes of a shared memory file as a writable array of bytes.");
  m.def("map_private", &map_private_array, "size"_a,
        "Zeroed memory like that of a model's weights, as a writable array of bytes.");
  m.def("prepare_arena", &prepare, "engine"_a, "buffer"_a, "offset"_a, "length"_a,
        "Gives a range of a shared mapping its memory, in huge pages if it can; says what it got.");
  m.def("describe_pages", &pages_of, "buffer"_a, "What kind of pages a buffer lies in.");

  bind_bench(m);
}
