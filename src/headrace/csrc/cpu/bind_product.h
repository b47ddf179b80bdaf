// Single products and quantizing for Python: product_entry.h, with its sizes checked.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "formats.h"
#include "product_entry.h"

namespace headrace::cpu {

using RawBytes = nanobind::ndarray<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using OutBytes = nanobind::ndarray<uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Inputs = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Outputs = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Parts = std::vector<std::pair<Format, int>>;

template <class Function>
Function* library_function(const std::string& path, const char* name) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = library == nullptr ? nullptr : dlsym(library, name);
  if (function == nullptr) throw std::runtime_error(dlerror());
  return reinterpret_cast<Function*>(function);
}

inline std::vector<Part> checked_parts(const Parts& parts, int inputs, size_t bytes, size_t outputs) {
  std::vector<Part> plain;
  size_t rows = 0;
  size_t wanted = 0;
  for (const auto& [format, count] : parts) {
    if (count < 1 || inputs < 1) throw std::invalid_argument("a part needs rows and inputs");
    plain.push_back({format, count});
    rows += count;
    wanted += raw_row_bytes(format, inputs) * count;
  }
  if (bytes != wanted) throw std::invalid_argument("raw has " + std::to_string(bytes) + " bytes, not " + std::to_string(wanted));
  if (outputs != rows) throw std::invalid_argument("out has " + std::to_string(outputs) + " outputs, not " + std::to_string(rows));
  return plain;
}

inline void product(const std::string& library, const Parts& parts, RawBytes raw, Rounding rounding, Inputs x, Outputs out) {
  const int inputs = static_cast<int>(x.shape(1));
  const std::vector<Part> plain = checked_parts(parts, inputs, raw.shape(0), out.shape(1));
  if (x.shape(0) != out.shape(0)) throw std::invalid_argument("x and out differ in rows");
  const auto function = library_function<decltype(headrace_product)>(library, "headrace_product");
  nanobind::gil_scoped_release released;
  function(plain.data(), static_cast<int>(plain.size()), inputs, raw.data(), rounding, x.data(), static_cast<int>(x.shape(0)), out.data());
}

inline void packed_rows(const std::string& library, const Parts& parts, RawBytes raw, Outputs out) {
  const int inputs = static_cast<int>(out.shape(1));
  const std::vector<Part> plain = checked_parts(parts, inputs, raw.shape(0), out.shape(0));
  const auto function = library_function<decltype(headrace_packed_rows)>(library, "headrace_packed_rows");
  function(plain.data(), static_cast<int>(plain.size()), inputs, raw.data(), out.data());
}

inline void quantize_rows(const std::string& library, Format from, RawBytes raw, int inputs, Format to, OutBytes out) {
  if (inputs < 1) throw std::invalid_argument("rows need inputs");
  const size_t row_bytes = raw_row_bytes(from, inputs);
  const size_t rows = raw.shape(0) / row_bytes;
  if (raw.shape(0) != rows * row_bytes || out.shape(0) != rows * raw_row_bytes(to, inputs)) {
    throw std::invalid_argument("raw and out are not the same number of whole rows");
  }
  const auto function = library_function<decltype(headrace_quantize_rows)>(library, "headrace_quantize_rows");
  nanobind::gil_scoped_release released;
  function(from, raw.data(), static_cast<int>(rows), inputs, to, out.data());
}

inline void bind_products(nanobind::module_& m) {
  using namespace nanobind::literals;
  m.def("product", &product, "library"_a, "parts"_a, "raw"_a, "rounding"_a, "x"_a, "out"_a,
        "x [rows, inputs] times the raw rows of (format, rows) parts, to out [rows, outputs] in float32.");
  m.def("packed_rows", &packed_rows, "library"_a, "parts"_a, "raw"_a, "out"_a, "Packs raw rows, and decodes them to out.");
  m.def("quantize_rows", &quantize_rows, "library"_a, "source"_a, "raw"_a, "inputs"_a, "target"_a, "out"_a,
        "Rows of F32, F16 or BF16 to blocks of Q8_0 or Q4_1.");
  m.def("raw_row_bytes", &raw_row_bytes, "format"_a, "inputs"_a);
}

}  // namespace headrace::cpu
