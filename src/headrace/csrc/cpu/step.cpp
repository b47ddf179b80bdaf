// One step of a model: rows of tokens in, hidden states and logits out, keys and values into the paged cache.
//
// Every thread runs the same function from the embedding to the logits; each phase (the inputs of a product, the product,
// attention) is shared out and ends at a barrier. It mirrors headrace.model.decoder.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "activation.h"
#include "attend.h"
#include "embed.h"
#include "epilogues.h"
#include "job.h"
#include "norm.h"
#include "pool.h"
#include "product.h"
#include "sample.h"
#include "weights.h"
#include "workspace.h"

#ifndef HEADRACE_SET
#define HEADRACE_SET "native"
#endif

namespace headrace::cpu {

namespace {

constexpr int SHORT_STEP = 64;  // rows: the phases of longer steps wait for each other long without any stall
constexpr int DRAWN_ALONE = 2;  // rows that are sampled before another thread would be awake

const float* data_or_null(const std::vector<float>& vector) {
  return vector.empty() ? nullptr : vector.data();
}

}  // namespace

class NativeModel final : public Model {
 public:
  explicit NativeModel(const Config& config);

  void add_matrix(int layer, MatrixName name, const Part* parts, int num_parts, int inputs) override {
    weights_.matrix(layer, name) = Matrix(parts, num_parts, inputs, weights_.arena());
  }
  void fill(int layer, MatrixName name, int first_row, int num_rows, const uint8_t* raw) override {
    weights_.matrix(layer, name).fill(first_row, num_rows, raw);
  }
  void set_vector(int layer, VectorName name, const float* values, int count) override {
    weights_.vector(layer, name).assign(values, values + count);
  }
  void set_rope(int kind, const float* cos, const float* sin, int positions, int dim) override {
    weights_.set_rope(kind, cos, sin, positions, dim);
  }
  void run(const Step& step) override;
  void logits(const float* hidden, int rows, float* out) override;
  void sample(const Draws& draws) override;
  int64_t bytes() const override { return weights_.bytes(); }
  int64_t workspace_bytes(int rows, int wanted, int max_positions) const override;
  const char* describe() const override { return HEADRACE_SET; }

 private:
  void prepare(const Step& step);
  void make_rooms();

  void run_rows(Worker& worker);
  void embed(Worker& worker);
  void attention(Worker& worker, int index);
  void feed_forward(Worker& worker, const Layer& layer, float* residual, int rows);
  void final_rows(Worker& worker, const float* residual);
  void write_keys(Worker& worker, const LayerAttention& attention, bool gather);
  LayerAttention layer_attention(int index);

  template <class Fill>
  Rows inputs(Worker& worker, const Matrix& matrix, int count, Fill fill);
  template <class Epilogue>
  void product(Worker& worker, const Matrix& matrix, const Rows& rows, Epilogue epilogue);
  void add_part(Worker& worker, const Matrix& matrix, const Rows& rows, const std::vector<float>& bias,
                const std::vector<float>& post_norm, float* residual);
  template <class Fill>
  void head(Worker& worker, int count, Fill fill, float* out);
  const float* normed(const float* row, const std::vector<float>& norm, int begin, int end, float* out) const;

  const Config config_;
  const RowSizes sizes_;
  const AttentionShape shape_;
  const CacheShape cache_shape_;
  Weights weights_;
  Workspace space_;
  Pool pool_;
  std::vector<std::unique_ptr<ThreadRoom>> rooms_;
  std::vector<RowDraw> row_draws_;
  Job job_;
};

NativeModel::NativeModel(const Config& config)
    : config_(config),
      sizes_(config),
      shape_{config.num_heads, config.num_kv_heads, config.head_dim},
      cache_shape_{config.cache_format, config.block_size, config.num_kv_heads, config.head_dim},
      weights_(config),
      space_(sizes_),
      pool_(config.threads) {}

// -- before the threads

void NativeModel::make_rooms() {
  size_t most = 0;
  weights_.each_matrix([&](const Matrix& matrix) { most = std::max<size_t>(most, matrix.inputs()); });
  const size_t own = own_rows_bytes(weights_, config_.rounding);
  std::vector<std::unique_ptr<ThreadRoom>> rooms;  // all of them or none, where memory is refused
  for (int i = 0; i < pool_.threads(); i++) {
    rooms.push_back(std::make_unique<ThreadRoom>(shape_, round_up<size_t>(most, LANES), own));
  }
  rooms_ = std::move(rooms);
}

void NativeModel::prepare(const Step& step) {
  if (rooms_.empty()) make_rooms();
  job_ = Job(step, weights_.layers(), shape_, pool_.threads());
  space_.grow(step.num_rows, job_.wanted == nullptr ? 0 : job_.num_outputs, job_.num_partials(),
              rows_bytes(weights_, config_.rounding, step.num_rows, job_.num_outputs));
}

void NativeModel::run(const Step& step) {
  if (step.num_rows == 0) return;
  prepare(step);
  auto rows = [this](Worker& worker) { run_rows(worker); };
  pool_.run(step.num_rows <= SHORT_STEP ? step.num_rows : 0, rows);
}

void NativeModel::logits(const float* hidden, int rows, float* out) {
  if (rows == 0) return;
  if (rooms_.empty()) make_rooms();
  space_.grow(0, 0, 0, rows_bytes(weights_, config_.rounding, 0, rows));
  auto run_head = [&](Worker& worker) {
    const size_t size = config_.hidden_size;
    head(worker, rows, [&](int row, int begin, int, float*) { return hidden + row * size + begin; }, out);
  };
  pool_.run(0, run_head);
}

void NativeModel::sample(const Draws& draws) {
  if (row_draws_.empty()) row_draws_ = std::vector<RowDraw>(pool_.threads(), RowDraw(config_.vocab_size));
  if (draws.num_rows <= DRAWN_ALONE) {
    for (int row = 0; row < draws.num_rows; row++) row_draws_[0].draw(draws, row);
    return;
  }
  auto draw_rows = [&](Worker& worker) {
    worker.share(draws.num_rows, 1, [&](int first, int last) {
      for (int row = first; row < last; row++) row_draws_[worker.index()].draw(draws, row);
    });
  };
  pool_.run(0, draw_rows);
}

int64_t NativeModel::workspace_bytes(int rows, int wanted, int max_positions) const {
  const int64_t parts = (max_positions + PART - 1) / PART;
  const int64_t split = static_cast<int64_t>(rows) * config_.num_heads * parts * (config_.head_dim + 2);
  const int64_t partials = parts > 1 ? std::min(split, AttentionPlan::MAX_PARTIALS) : 0;
  return Workspace::bytes(sizes_, rows, wanted, partials, rows_bytes(weights_, config_.rounding, rows, wanted)) +
         pool_.threads() * RowDraw::bytes(config_.vocab_size);
}

// -- what every thread runs

void NativeModel::run_rows(Worker& worker) {
  embed(worker);
  const std::vector<Layer>& layers = weights_.layers();
  float* residual = space_.residual.as<float>();
  int rows = job_.step->num_rows;
  for (int i = 0; i < static_cast<int>(layers.size()); i++) {
    attention(worker, i);
    if (i + 1 == static_cast<int>(layers.size()) && job_.wanted != nullptr) {
      residual = space_.wanted_residual.as<float>();
      rows = job_.num_outputs;
      if (rows == 0) return;
    }
    feed_forward(worker, layers[i], residual, rows);
  }
  final_rows(worker, residual);
}

void NativeModel::embed(Worker& worker) {
  float* residual = space_.residual.as<float>();
  worker.share(job_.step->num_rows, 4, [&](int first, int last) {
    for (int row = first; row < last; row++) {
      embed_token(weights_.embedding(), job_.step->token_ids[row], config_.embed_scale, residual + row * sizes_.hidden);
    }
  });
}

// Inputs of a product, rounded. fill(row, begin, end, room) -> the values of inputs [begin, end), in `room` or elsewhere.
// Pieces are of a panel and a range of inputs: the rows of a panel share cache lines, which two threads must not write at once.
template <class Fill>
Rows NativeModel::inputs(Worker& worker, const Matrix& matrix, int count, Fill fill) {
  ThreadRoom& room = *rooms_[worker.index()];
  const int size = matrix.inputs();
  const bool own = static_cast<int64_t>(count) * size <= OWN_INPUTS;
  Rows rows(own ? room.rows.data() : space_.rounded.data(), count, size, matrix.row_kinds(config_.rounding), config_.rounding);
  const auto piece = [&](int panel, int begin, int end) {
    for (int row = rows.first_row(panel); row < rows.end_row(panel); row++) {
      rows.put(row, begin, end, fill(row, begin, end, room.values.data()));
    }
  };
  if (own) {
    for (int panel = 0; panel < rows.panels(); panel++) piece(panel, 0, size);
    return rows;
  }
  const int wanted = (4 * worker.threads() + rows.panels() - 1) / rows.panels();
  const int ranges = std::clamp(size / 128, 1, wanted);
  const int length = round_up((size + ranges - 1) / ranges, 64);
  const int pieces = (size + length - 1) / length;
  worker.share(rows.panels() * pieces, 1, [&](int first, int last) {
    for (int i = first; i < last; i++) {
      const int begin = i % pieces * length;
      piece(i / pieces, begin, std::min(size, begin + length));
    }
  });
  return rows;
}

template <class Epilogue>
void NativeModel::product(Worker& worker, const Matrix& matrix, const Rows& rows, Epilogue epilogue) {
  worker.share(num_units(matrix, rows), units_per_bite(matrix, rows, worker.threads()),
               [&](int first, int last) { multiply(matrix, rows, first, last, epilogue); });
}

const float* NativeModel::normed(const float* row, const std::vector<float>& norm, int begin, int end, float* out) const {
  if (norm.empty()) return row + begin;
  const float scale = inverse_rms(row, config_.hidden_size, config_.norm_eps);
  scale_by_weight(row + begin, scale, norm.data() + begin, end - begin, out);
  return out;
}

// Closes a part of a layer: its last product, normed where the model says so, is added to the residual stream.
void NativeModel::add_part(Worker& worker, const Matrix& matrix, const Rows& rows, const std::vector<float>& bias,
                           const std::vector<float>& post_norm, float* residual) {
  if (post_norm.empty()) {
    product(worker, matrix, rows, AddRows{residual, sizes_.hidden, data_or_null(bias), config_.residual_scale});
    return;
  }
  float* part = space_.part.as<float>();
  product(worker, matrix, rows, StoreRows{part, sizes_.hidden, data_or_null(bias)});
  worker.share(rows.rows(), 4, [&](int first, int last) {
    for (int row = first; row < last; row++) {
      add_normed(part + row * sizes_.hidden, post_norm.data(), config_.hidden_size, config_.norm_eps, config_.residual_scale,
                 residual + row * sizes_.hidden);
    }
  });
}

LayerAttention NativeModel::layer_attention(int index) {
  const Layer& layer = weights_.layers()[index];
  const Step& step = *job_.step;
  const bool last = job_.wanted != nullptr && index + 1 == config_.num_layers;
  return {
      .shape = shape_,
      .scale = config_.attn_scale,
      .softcap = config_.attn_softcap,
      .norm_eps = config_.norm_eps,
      .q_norm = layer.vector(VectorName::Q_NORM),
      .k_norm = layer.vector(VectorName::K_NORM),
      .rope = weights_.rope(layer.rope_kind),
      .cache = {&cache_shape_, static_cast<uint8_t*>(step.keys[index]), static_cast<uint8_t*>(step.values[index])},
      .plan = job_.plans[job_.layer_plan[index]],
      .queries = last ? job_.wanted_queries : job_.queries,
      .qkv = space_.qkv.as<float>(),
      .qkv_stride = sizes_.qkv,
      .positions = step.positions,
      .slot_mapping = step.slot_mapping,
      .attended = space_.attended.as<float>(),
      .attended_stride = sizes_.attended,
      .partials = space_.partials.as<float>(),
  };
}

// All rows' keys and values, before any row attends to them; in the last layer also the residual stream of the wanted rows.
void NativeModel::write_keys(Worker& worker, const LayerAttention& attention, bool gather) {
  const int kv_heads = config_.num_kv_heads;
  const int writes = job_.step->num_rows * kv_heads;
  worker.share(writes + (gather ? job_.num_outputs : 0), 8, [&](int first, int last) {
    for (int i = first; i < last; i++) {
      if (i < writes) {
        attention.write_row(i / kv_heads, i % kv_heads, rooms_[worker.index()]->attention);
        continue;
      }
      const float* from = space_.residual.as<float>() + job_.wanted[i - writes] * sizes_.hidden;
      std::copy_n(from, config_.hidden_size, space_.wanted_residual.as<float>() + (i - writes) * sizes_.hidden);
    }
  });
}

void NativeModel::attention(Worker& worker, int index) {
  const Layer& layer = weights_.layers()[index];
  float* residual = space_.residual.as<float>();
  const std::vector<float>& norm = layer.vector(VectorName::INPUT_NORM);
  const Matrix& qkv = layer.matrix(MatrixName::QKV);
  const Rows rows = inputs(worker, qkv, job_.step->num_rows, [&](int row, int begin, int end, float* room) {
    return normed(residual + row * sizes_.hidden, norm, begin, end, room);
  });
  product(worker, qkv, rows, StoreRows{space_.qkv.as<float>(), sizes_.qkv, data_or_null(layer.vector(VectorName::QKV_BIAS))});

  const LayerAttention attention = layer_attention(index);
  const bool last = job_.wanted != nullptr && index + 1 == config_.num_layers;
  const bool write = job_.unrelated && !last;
  if (!write) write_keys(worker, attention, last);
  const std::vector<AttentionPlan::Item>& items = attention.plan.items();
  AttentionScratch& scratch = rooms_[worker.index()]->attention;
  worker.share(static_cast<int>(items.size()), 1, [&](int first, int end) {
    for (int i = first; i < end; i++) {
      if (i + 1 < static_cast<int>(items.size())) attention.prefetch_queries(items[i + 1]);
      attention.run(items[i], write, scratch);
    }
  }, false);

  const int count = static_cast<int>(attention.queries.size());
  if (count == 0) return;
  const Matrix& o = layer.matrix(MatrixName::O);
  const Rows attended = inputs(worker, o, count, [&](int row, int begin, int end, float* room) {
    return attention.outputs(row, begin, end, room);
  });
  add_part(worker, o, attended, layer.vector(VectorName::O_BIAS), layer.vector(VectorName::POST_ATTN_NORM),
           last ? space_.wanted_residual.as<float>() : residual);
}

void NativeModel::feed_forward(Worker& worker, const Layer& layer, float* residual, int count) {
  const std::vector<float>& norm = layer.vector(VectorName::MLP_NORM);
  const Matrix& gate_up = layer.matrix(MatrixName::GATE_UP);
  const Rows rows = inputs(worker, gate_up, count, [&](int row, int begin, int end, float* room) {
    return normed(residual + row * sizes_.hidden, norm, begin, end, room);
  });
  float* gates = space_.gate_up.as<float>();
  product(worker, gate_up, rows, StoreRows{gates, sizes_.gate_up, data_or_null(layer.vector(VectorName::GATE_UP_BIAS))});

  const Matrix& down = layer.matrix(MatrixName::DOWN);
  const Rows inner = inputs(worker, down, count, [&](int row, int begin, int end, float* room) {
    const float* gate = gates + row * sizes_.gate_up + begin;
    gated(config_.activation, gate, gate + config_.intermediate_size, end - begin, sizes_.gate_up, room);
    return room;
  });
  add_part(worker, down, inner, layer.vector(VectorName::DOWN_BIAS), layer.vector(VectorName::POST_MLP_NORM), residual);
}

void NativeModel::final_rows(Worker& worker, const float* residual) {
  const Step& step = *job_.step;
  const std::vector<float>& norm = weights_.final_norm();
  if (step.hidden != nullptr) {
    worker.share(job_.num_outputs, 4, [&](int first, int last) {
      for (int row = first; row < last; row++) {
        float* out = step.hidden + static_cast<size_t>(row) * config_.hidden_size;
        normed(residual + row * sizes_.hidden, norm, 0, config_.hidden_size, out);
      }
    });
  }
  if (step.logits != nullptr) {
    head(worker, job_.num_outputs, [&](int row, int begin, int end, float* room) {
      return normed(residual + row * sizes_.hidden, norm, begin, end, room);
    }, step.logits);
  }
}

template <class Fill>
void NativeModel::head(Worker& worker, int count, Fill fill, float* out) {
  const Rows rows = inputs(worker, weights_.head(), count, fill);
  product(worker, weights_.head(), rows,
          StoreLogits{out, static_cast<size_t>(config_.vocab_size), config_.logit_scale, config_.logit_softcap});
}

}  // namespace headrace::cpu

extern "C" {

__attribute__((visibility("default"))) headrace::cpu::Model* headrace_make_model(const headrace::cpu::Config& config) {
  const int dim = config.head_dim;
  if (dim < 2 || dim > headrace::cpu::MAX_DIM || dim % 2 != 0) {
    throw std::invalid_argument("head_dim " + std::to_string(dim) + ": an even number from 2 to 256");
  }
  if (config.num_kv_heads < 1 || config.num_heads % config.num_kv_heads != 0) {
    throw std::invalid_argument("num_heads " + std::to_string(config.num_heads) + " is no multiple of num_kv_heads " +
                                std::to_string(config.num_kv_heads));
  }
  if (config.block_size < headrace::cpu::PAGE || config.block_size % headrace::cpu::PAGE != 0) {
    throw std::invalid_argument("block_size " + std::to_string(config.block_size) + ": a multiple of 16");
  }
  return new headrace::cpu::NativeModel(config);
}

__attribute__((visibility("default"))) int headrace_step_abi() {
  return headrace::cpu::STEP_ABI;
}
}
