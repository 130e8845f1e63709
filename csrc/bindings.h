// What all bindings share: array types, checks, and views of Python's buffers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "linear.h"

namespace dualpace {

namespace nb = nanobind;

template <class T, int Dims>
using In = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <class T, int Dims>
using Out = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using AnyIn = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

inline void require(bool ok, const std::string& rule) {
  if (!ok) throw std::invalid_argument(rule);
}

inline DType parse_dtype(const std::string& name) {
  require(name == "float32" || name == "bfloat16", "dtype must be float32 or bfloat16");
  return name == "bfloat16" ? kBFloat16 : kFloat32;
}

inline Source source_of(const AnyIn& array) {
  if (array.dtype() == nb::dtype<uint16_t>()) return {array.data(), kBFloat16};
  require(array.dtype() == nb::dtype<float>(), "tensors must be float32, or bfloat16 as uint16");
  return {array.data(), kFloat32};
}

// A writable buffer of Python's (mmap, memoryview, array), held while the object lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return static_cast<char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// Lists of lists, flat: entry i is values[offsets[i]:offsets[i+1]].
struct Ragged {
  Ragged(const In<int64_t, 1>& offsets, const In<int32_t, 1>& values, size_t rows,
         const char* name)
      : offsets_(offsets.data()), values_(values.data()) {
    bool ok = offsets.shape(0) == rows + 1 && offsets_[0] == 0 &&
              offsets_[rows] == static_cast<int64_t>(values.shape(0));
    for (size_t i = 0; ok && i < rows; ++i) ok = offsets_[i] <= offsets_[i + 1];
    require(ok, std::string(name) + ": offsets do not match the values");
  }
  const int32_t* begin(size_t row) const { return values_ + offsets_[row]; }
  int64_t length(size_t row) const { return offsets_[row + 1] - offsets_[row]; }

 private:
  const int64_t* offsets_;
  const int32_t* values_;
};

// The measuring functions of `dualpace bench kernels` (bindings_bench.cpp).
void bind_bench(nb::module_& m);

}  // namespace dualpace
