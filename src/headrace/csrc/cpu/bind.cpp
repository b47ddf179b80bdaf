// The Python extension headrace.native._step: says what the CPU has, opens a library of an instruction set, and binds its
// Model. Compiled for the baseline; nothing here computes.
//
// Whatever Python hands over is checked here, before a library sees it: types, contiguity, sizes, and every number that
// becomes an address. So a mistake above is a Python exception and never a crash.
#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_checks.h"
#include "bind_product.h"
#include "bind_slots.h"
#include "cpu_features.h"
#include "formats.h"
#include "model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::cpu {

template <typename T, size_t Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <typename T, size_t Dims>
using Output = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;  // rows may lie apart
using Blocks = nb::ndarray<nb::c_contig, nb::device::cpu>;               // a layer's keys or values, of any dtype

using MakeModel = Model* (*)(const Config&);
using Abi = int (*)();

// The library's maker of models. A library stays open for ever: its threads may still be on their way out.
MakeModel open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto abi = reinterpret_cast<Abi>(dlsym(library, "headrace_step_abi"));
  const auto make = reinterpret_cast<MakeModel>(dlsym(library, "headrace_make_model"));
  if (abi == nullptr || make == nullptr) throw std::runtime_error(path + " is no library of Headrace's native step");
  if (abi() != STEP_ABI) {
    throw std::runtime_error(path + " was built for interface " + std::to_string(abi()) + " of the native step, this is " +
                             std::to_string(STEP_ABI));
  }
  return make;
}

// A Model with what is needed to check its callers.
class BoundModel {
 public:
  BoundModel(const std::string& library, const Config& config, std::vector<int> windows, std::vector<int> rope_kinds)
      : checks_(config, windows, rope_kinds) {
    Config own = config;
    own.windows = windows.empty() ? nullptr : windows.data();
    own.rope_kinds = rope_kinds.empty() ? nullptr : rope_kinds.data();
    model_.reset(open_library(library)(own));
  }

  void add_matrix(int layer, MatrixName name, const std::vector<std::pair<Format, int>>& parts, int inputs) {
    std::vector<Part> plain;
    for (const auto& [format, rows] : parts) plain.push_back({format, rows});
    checks_.add_matrix(layer, name, plain, inputs);
    model_->add_matrix(layer, name, plain.data(), static_cast<int>(plain.size()), inputs);
    checks_.matrix_added(layer, name, plain);
  }

  void fill(int layer, MatrixName name, int first_row, Array<uint8_t, 2> raw) {
    checks_.fill(layer, name, first_row, raw.shape(0), raw.shape(1));
    nb::gil_scoped_release released;
    model_->fill(layer, name, first_row, static_cast<int>(raw.shape(0)), raw.data());
  }

  void set_vector(int layer, VectorName name, Array<float, 1> values) {
    checks_.vector(layer, name, values.shape(0));
    model_->set_vector(layer, name, values.data(), static_cast<int>(values.shape(0)));
  }

  void set_rope(int kind, Array<float, 2> cos, Array<float, 2> sin) {
    if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1)) {
      throw std::invalid_argument("cos and sin differ in shape");
    }
    checks_.rope(kind, cos.shape(0), cos.shape(1));
    model_->set_rope(kind, cos.data(), sin.data(), static_cast<int>(cos.shape(0)), 2 * static_cast<int>(cos.shape(1)));
    checks_.rope_set(kind, cos.shape(0));
  }

  // The blocks of every layer, which live as long as the caller keeps the arrays or until another cache is set.
  void set_cache(std::vector<Blocks> keys, std::vector<Blocks> values) {
    const std::lock_guard lock(stepping_);
    std::vector<size_t> key_bytes, value_bytes;
    for (const Blocks& layer : keys) key_bytes.push_back(layer.nbytes());
    for (const Blocks& layer : values) value_bytes.push_back(layer.nbytes());
    checks_.cache(key_bytes, value_bytes);
    keys_.clear();
    values_.clear();
    for (const Blocks& layer : keys) keys_.push_back(layer.data());
    for (const Blocks& layer : values) values_.push_back(layer.data());
    held_ = {std::move(keys), std::move(values)};
  }

  void run(Array<int32_t, 1> token_ids, Array<int32_t, 1> positions, Array<int64_t, 1> slot_mapping,
           Array<int32_t, 1> seq_slots, Array<int32_t, 1> query_start, Table block_tables,
           std::optional<Array<int64_t, 1>> wanted, std::optional<Output<float, 2>> hidden,
           std::optional<Output<float, 2>> logits) {
    Step step;
    step.num_rows = static_cast<int>(token_ids.shape(0));
    step.num_seqs = static_cast<int>(seq_slots.shape(0));
    checks_.length("positions", positions.shape(0), token_ids.shape(0));
    checks_.length("slot_mapping", slot_mapping.shape(0), token_ids.shape(0));
    checks_.length("query_start", query_start.shape(0), seq_slots.shape(0) + 1);
    if (block_tables.shape(1) > 1 && block_tables.stride(1) != 1) {
      throw std::invalid_argument("block_tables: the entries of a row must lie side by side");
    }
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.slot_mapping = slot_mapping.data();
    step.seq_slots = seq_slots.data();
    step.query_start = query_start.data();
    step.block_tables = block_tables.data();
    step.table_stride = block_tables.stride(0);
    static const int64_t nothing = 0;  // of no rows an array may have no address, which would mean all
    if (wanted) {
      step.wanted = wanted->shape(0) ? wanted->data() : &nothing;
      step.num_wanted = static_cast<int>(wanted->shape(0));
    }
    const size_t rows = wanted ? wanted->shape(0) : token_ids.shape(0);
    if (hidden) {
      checks_.output("hidden", hidden->shape(0), hidden->shape(1), rows, checks_.config().hidden_size);
      step.hidden = hidden->data();
    }
    if (logits) {
      checks_.output("logits", logits->shape(0), logits->shape(1), rows, checks_.config().vocab_size);
      step.logits = logits->data();
    }
    nb::gil_scoped_release released;
    const std::lock_guard lock(stepping_);
    step.keys = keys_.data();
    step.values = values_.data();
    checks_.step(step, block_tables.shape(0), block_tables.shape(1));
    model_->run(step);
  }

  void logits(Array<float, 2> hidden, Output<float, 2> out) {
    checks_.output("hidden", hidden.shape(0), hidden.shape(1), hidden.shape(0), checks_.config().hidden_size);
    checks_.output("logits", out.shape(0), out.shape(1), hidden.shape(0), checks_.config().vocab_size);
    checks_.complete();
    nb::gil_scoped_release released;
    const std::lock_guard lock(stepping_);
    model_->logits(hidden.data(), static_cast<int>(hidden.shape(0)), out.data());
  }

  void sample(Array<float, 2> logits, Array<float, 1> temperature, Array<int32_t, 1> top_k, Array<float, 1> top_p,
              Array<float, 1> min_p, Array<int64_t, 1> seed, Array<int64_t, 1> output_index, Array<int32_t, 1> sample_index,
              float greedy_eps, Output<int32_t, 1> ids, Output<bool, 1> failed) {
    const size_t rows = logits.shape(0);
    checks_.output("logits", rows, logits.shape(1), rows, checks_.config().vocab_size);
    const std::pair<const char*, size_t> lengths[] = {
        {"temperature", temperature.shape(0)}, {"top_k", top_k.shape(0)}, {"top_p", top_p.shape(0)},
        {"min_p", min_p.shape(0)}, {"seed", seed.shape(0)}, {"output_index", output_index.shape(0)},
        {"sample_index", sample_index.shape(0)}, {"ids", ids.shape(0)}, {"failed", failed.shape(0)},
    };
    for (const auto& [name, length] : lengths) checks_.length(name, length, rows);
    const Draws draws{
        .num_rows = static_cast<int>(rows), .logits = logits.data(), .temperature = temperature.data(), .top_k = top_k.data(),
        .top_p = top_p.data(), .min_p = min_p.data(), .seed = seed.data(), .output_index = output_index.data(),
        .sample_index = sample_index.data(), .greedy_eps = greedy_eps, .ids = ids.data(), .failed = failed.data(),
    };
    nb::gil_scoped_release released;
    const std::lock_guard lock(stepping_);
    model_->sample(draws);
  }

  // The slots' tables, which live as long as the caller keeps the arrays or until others are set.
  void set_tables(Entries token_ids, Entries block_tables, Column<float> temperature, Column<float> top_p, Column<float> min_p,
                  Column<int64_t> seed, Column<int64_t> top_k, Column<int64_t> sample_index, Column<int64_t> prompt_len,
                  std::vector<int32_t> tokenless) {
    const std::lock_guard lock(stepping_);
    slots_.set({token_ids, block_tables, temperature, top_p, min_p, seed, top_k, sample_index, prompt_len, std::move(tokenless)},
               checks_.config().vocab_size);
  }

  // `run` and `sample` for one token more of each of these slots, in one call. -> the ids, which are in the table of tokens too,
  // and the rows that failed.
  std::pair<std::vector<int32_t>, std::vector<int>> decode(Array<int32_t, 1> slots, Array<int32_t, 1> positions,
                                                           float greedy_eps, Output<float, 2> logits) {
    const size_t rows = slots.shape(0);
    const int vocab_size = checks_.config().vocab_size;
    checks_.length("positions", positions.shape(0), rows);
    checks_.output("logits", logits.shape(0), logits.shape(1), rows, vocab_size);
    nb::gil_scoped_release released;
    const std::lock_guard lock(stepping_);
    Step step = slots_.step(slots.data(), positions.data(), static_cast<int>(rows), checks_.config().block_size);
    step.logits = logits.data();
    step.keys = keys_.data();
    step.values = values_.data();
    checks_.step(step, slots_.num_tables(), slots_.table_blocks());
    model_->run(step);
    std::vector<int32_t> ids(rows);
    const std::unique_ptr<bool[]> failed(new bool[rows]);
    model_->sample(slots_.draws(step, vocab_size, greedy_eps, ids.data(), failed.get()));
    slots_.write(step, ids.data());
    std::vector<int> failures;
    for (size_t row = 0; row < rows; row++) {
      if (failed[row]) failures.push_back(static_cast<int>(row));
    }
    return {std::move(ids), std::move(failures)};
  }

  int64_t bytes() const { return model_->bytes(); }
  int64_t workspace_bytes(int rows, int wanted, int max_positions) const {
    return model_->workspace_bytes(rows, wanted, max_positions);
  }
  std::string describe() const { return model_->describe(); }

 private:
  BindChecks checks_;
  std::unique_ptr<Model> model_;
  std::mutex stepping_;  // one step at a time, over one cache: callers in other threads wait, without Python's lock
  std::vector<void*> keys_, values_;
  std::pair<std::vector<Blocks>, std::vector<Blocks>> held_;
  SlotRows slots_;
};

// Bytes of a part of a matrix in memory.
int64_t packed_bytes(Format format, int64_t rows, int inputs) {
  return (rows + STRIP - 1) / STRIP * static_cast<int64_t>(strip_bytes(format, inputs));
}

}  // namespace headrace::cpu

NB_MODULE(_step, m) {
  using namespace headrace::cpu;
  m.attr("STEP_ABI") = STEP_ABI;
  m.attr("BINDING") = 2;  // moves on when Python calls this otherwise
  m.def("cpu_features", &cpu_features, "Names of the instruction set extensions that this CPU and its system offer.");

  nb::enum_<Format>(m, "Format")
      .value("F32", Format::F32)
      .value("F16", Format::F16)
      .value("BF16", Format::BF16)
      .value("Q8_0", Format::Q8_0)
      .value("Q4_0", Format::Q4_0)
      .value("Q4_1", Format::Q4_1)
      .value("Q4_K", Format::Q4_K)
      .value("Q5_K", Format::Q5_K)
      .value("Q6_K", Format::Q6_K)
      .value("Q4_Z", Format::Q4_Z)
      .value("F8", Format::F8);
  nb::enum_<Rounding>(m, "Rounding")
      .value("FLOAT", Rounding::FLOAT)
      .value("INT16", Rounding::INT16)
      .value("INT8", Rounding::INT8);
  bind_products(m);
  nb::enum_<CacheFormat>(m, "CacheFormat")
      .value("F32", CacheFormat::F32)
      .value("BF16", CacheFormat::BF16)
      .value("INT8", CacheFormat::INT8);
  nb::enum_<Activation>(m, "Activation")
      .value("SILU", Activation::SILU)
      .value("GELU_TANH", Activation::GELU_TANH)
      .value("GELU", Activation::GELU);
  nb::enum_<MatrixName>(m, "MatrixName")
      .value("QKV", MatrixName::QKV)
      .value("O", MatrixName::O)
      .value("GATE_UP", MatrixName::GATE_UP)
      .value("DOWN", MatrixName::DOWN)
      .value("HEAD", MatrixName::HEAD)
      .value("EMBEDDING", MatrixName::EMBEDDING);
  nb::enum_<VectorName>(m, "VectorName")
      .value("INPUT_NORM", VectorName::INPUT_NORM)
      .value("POST_ATTN_NORM", VectorName::POST_ATTN_NORM)
      .value("MLP_NORM", VectorName::MLP_NORM)
      .value("POST_MLP_NORM", VectorName::POST_MLP_NORM)
      .value("Q_NORM", VectorName::Q_NORM)
      .value("K_NORM", VectorName::K_NORM)
      .value("QKV_BIAS", VectorName::QKV_BIAS)
      .value("O_BIAS", VectorName::O_BIAS)
      .value("GATE_UP_BIAS", VectorName::GATE_UP_BIAS)
      .value("DOWN_BIAS", VectorName::DOWN_BIAS)
      .value("FINAL_NORM", VectorName::FINAL_NORM);

  m.def("block_bytes", &block_bytes, "format"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a);
  m.def("packed_bytes", &packed_bytes, "format"_a, "rows"_a, "inputs"_a);

  nb::class_<Config>(m, "Config")
      .def(nb::init<>())
      .def_rw("vocab_size", &Config::vocab_size)
      .def_rw("hidden_size", &Config::hidden_size)
      .def_rw("num_layers", &Config::num_layers)
      .def_rw("num_heads", &Config::num_heads)
      .def_rw("num_kv_heads", &Config::num_kv_heads)
      .def_rw("head_dim", &Config::head_dim)
      .def_rw("intermediate_size", &Config::intermediate_size)
      .def_rw("norm_eps", &Config::norm_eps)
      .def_rw("activation", &Config::activation)
      .def_rw("attn_scale", &Config::attn_scale)
      .def_rw("attn_softcap", &Config::attn_softcap)
      .def_rw("embed_scale", &Config::embed_scale)
      .def_rw("residual_scale", &Config::residual_scale)
      .def_rw("logit_scale", &Config::logit_scale)
      .def_rw("logit_softcap", &Config::logit_softcap)
      .def_rw("rounding", &Config::rounding)
      .def_rw("cache_format", &Config::cache_format)
      .def_rw("block_size", &Config::block_size)
      .def_rw("threads", &Config::threads);

  nb::class_<BoundModel>(m, "Model")
      .def(nb::init<const std::string&, const Config&, std::vector<int>, std::vector<int>>(), "library"_a, "config"_a,
           "windows"_a, "rope_kinds"_a)
      .def("add_matrix", &BoundModel::add_matrix, "layer"_a, "name"_a, "parts"_a, "inputs"_a)
      .def("fill", &BoundModel::fill, "layer"_a, "name"_a, "first_row"_a, "raw"_a)
      .def("set_vector", &BoundModel::set_vector, "layer"_a, "name"_a, "values"_a)
      .def("set_rope", &BoundModel::set_rope, "kind"_a, "cos"_a, "sin"_a)
      .def("set_cache", &BoundModel::set_cache, "keys"_a, "values"_a)
      .def("run", &BoundModel::run, "token_ids"_a, "positions"_a, "slot_mapping"_a, "seq_slots"_a, "query_start"_a,
           "block_tables"_a, "wanted"_a.none(), "hidden"_a.none(), "logits"_a.none())
      .def("logits", &BoundModel::logits, "hidden"_a, "out"_a)
      .def("sample", &BoundModel::sample, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a,
           "output_index"_a, "sample_index"_a, "greedy_eps"_a, "ids"_a, "failed"_a)
      .def("set_tables", &BoundModel::set_tables, "token_ids"_a, "block_tables"_a, "temperature"_a, "top_p"_a, "min_p"_a,
           "seed"_a, "top_k"_a, "sample_index"_a, "prompt_len"_a, "tokenless"_a)
      .def("decode", &BoundModel::decode, "slots"_a, "positions"_a, "greedy_eps"_a, "logits"_a)
      .def("bytes", &BoundModel::bytes)
      .def("workspace_bytes", &BoundModel::workspace_bytes, "rows"_a, "wanted"_a, "max_positions"_a)
      .def("describe", &BoundModel::describe);
}
