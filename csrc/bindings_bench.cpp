// Python bindings of kernel_bench.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "engine.h"
#include "kernel_bench.h"

using namespace nanobind::literals;

namespace dualpace {
namespace {

// LinearBench over a buffer in which many copies of the weights lie one behind the other.
class LinearCase {
 public:
  LinearCase(Engine& engine, nb::handle memory, int n, int k, bool swiglu)
      : memory_(memory), k_(static_cast<size_t>(k)), bench_(engine, n, k, swiglu) {
    require(n > 0 && k > 0 && (!swiglu || n % (2 * kPanel) == 0), "impossible sizes");
    require(copies() > 0, "the memory is too small for the weights");
  }

  int copies() const { return static_cast<int>(memory_.size() / bench_.weight_bytes()); }
  size_t weight_bytes() const { return bench_.weight_bytes(); }

  void set_input(const In<float, 2>& x) {
    require(x.shape(0) > 0 && x.shape(1) == k_, "input must be [rows, k]");
    rows_ = x.shape(0);
    bench_.set_input(x.data(), static_cast<int>(rows_));
  }

  double run(int copy) {
    require(rows_ > 0, "there is no input yet");
    char* weights = weights_of(copy);
    const nb::gil_scoped_release release;
    return bench_.run(weights);
  }

  void output(const Out<float, 2>& out) const {
    require(out.shape(0) == rows_ && out.shape(1) == static_cast<size_t>(bench_.outputs()),
            "out must be [rows, outputs]");
    bench_.output(out.data());
  }

  void weight_row(int copy, int row, const Out<float, 1>& out) const {
    require(out.shape(0) == k_ && row >= 0, "out must be [k]");
    bench_.weight_row(weights_of(copy), row, out.data());
  }

 private:
  char* weights_of(int copy) const {
    require(copy >= 0 && copy < copies(), "no such copy");
    return memory_.data() + static_cast<size_t>(copy) * bench_.weight_bytes();
  }

  Buffer memory_;
  size_t k_;
  size_t rows_ = 0;
  LinearBench bench_;
};

// AttentionBench over an arena, in bfloat16.
class AttentionCase {
 public:
  AttentionCase(Engine& engine, nb::handle arena, int num_layers, int num_kv_heads, int page_tokens,
                const In<float, 3>& query, const In<int64_t, 1>& positions,
                const In<int64_t, 1>& page_offsets, const In<int32_t, 1>& pages)
      : arena_(arena),
        num_layers_(num_layers),
        pages_(pages.data(), pages.data() + pages.shape(0)),
        bench_(make(engine, num_kv_heads, page_tokens, query, positions, page_offsets, pages)) {}

  double run(int layer) {
    require(layer >= 0 && layer < num_layers_, "no such layer");
    const nb::gil_scoped_release release;
    return bench_.run(arena_.data(), layer);
  }

  void output(const Out<float, 3>& out) const {
    require(out.size() == bench_.output().size(), "out must be shaped like the query");
    std::copy(bench_.output().begin(), bench_.output().end(), out.data());
  }

 private:
  AttentionBench make(Engine& engine, int num_kv_heads, int page_tokens, const In<float, 3>& query,
                      const In<int64_t, 1>& positions, const In<int64_t, 1>& page_offsets,
                      const In<int32_t, 1>& pages) const {
    const size_t m = query.shape(0);
    const int heads = static_cast<int>(query.shape(1)), dim = static_cast<int>(query.shape(2));
    require(m > 0 && num_layers_ > 0 && page_tokens > 0 && num_kv_heads > 0 && heads > 0 &&
                heads % num_kv_heads == 0 && positions.shape(0) == m,
            "shapes differ");
    const CacheShape shape{num_layers_, num_kv_heads, page_tokens, dim, kBFloat16};
    const Ragged table(page_offsets, pages, m, "pages");
    const int64_t num_pages = static_cast<int64_t>(arena_.size() / shape.page_bytes());
    for (const int32_t page : pages_) {
      require(page >= 0 && page < num_pages, "page id out of range");
    }
    CacheRows rows;
    for (size_t i = 0; i < m; ++i) {
      require(positions(i) >= 0 && positions(i) / page_tokens < table.length(i),
              "position out of range");
      rows.positions.push_back(positions(i));
      rows.pages.push_back(pages_.data() + page_offsets(i));
    }
    return {engine, shape, heads / num_kv_heads, std::move(rows), query.data()};
  }

  Buffer arena_;
  int num_layers_;
  std::vector<int32_t> pages_;
  AttentionBench bench_;
};

double read(Engine& engine, nb::handle buffer) {
  const Buffer memory(buffer);
  const nb::gil_scoped_release release;
  return time_read(engine.pool(), memory.data(), memory.size());
}

void fill(Engine& engine, nb::handle buffer, bool wide) {
  const Buffer memory(buffer);
  const nb::gil_scoped_release release;
  fill_bfloat16(engine.pool(), memory.data(), memory.size(), wide);
}

double barrier(Engine& engine, int rounds) {
  require(rounds > 0, "rounds must be positive");
  const nb::gil_scoped_release release;
  return time_barrier(engine.pool(), rounds);
}

double sampling(Engine& engine, int rows, int vocab) {
  require(rows > 0 && vocab > 0, "rows and vocab must be positive");
  const nb::gil_scoped_release release;
  return time_sampling(engine.pool(), rows, vocab);
}

}  // namespace

void bind_bench(nb::module_& m) {
  nb::class_<LinearCase>(m, "LinearBench", "A linear layer of bfloat16 weights, to be timed.")
      .def(nb::init<Engine&, nb::handle, int, int, bool>(), "engine"_a, "memory"_a, "n"_a, "k"_a,
           "swiglu"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("copies", &LinearCase::copies)
      .def_prop_ro("weight_bytes", &LinearCase::weight_bytes)
      .def("set_input", &LinearCase::set_input, "x"_a)
      .def("run", &LinearCase::run, "copy"_a)
      .def("output", &LinearCase::output, "out"_a)
      .def("weight_row", &LinearCase::weight_row, "copy"_a, "row"_a, "out"_a);

  nb::class_<AttentionCase>(m, "AttentionBench", "Paged attention over bfloat16, to be timed.")
      .def(nb::init<Engine&, nb::handle, int, int, int, const In<float, 3>&, const In<int64_t, 1>&,
                    const In<int64_t, 1>&, const In<int32_t, 1>&>(),
           "engine"_a, "arena"_a, "num_layers"_a, "num_kv_heads"_a, "page_tokens"_a, "query"_a,
           "positions"_a, "page_offsets"_a, "pages"_a, nb::keep_alive<1, 2>())
      .def("run", &AttentionCase::run, "layer"_a)
      .def("output", &AttentionCase::output, "out"_a);

  m.def("time_read", &read, "engine"_a, "buffer"_a);
  m.def("time_barrier", &barrier, "engine"_a, "rounds"_a);
  m.def("time_sampling", &sampling, "engine"_a, "rows"_a, "vocab"_a);
  m.def("fill_bfloat16", &fill, "engine"_a, "buffer"_a, "wide"_a);
}

}  // namespace dualpace
