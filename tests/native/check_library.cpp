// Checks one library of the native step where there is no Python, as under an emulator.
//
//     check_library <library> <file>
//
// Without arguments it prints what the CPU can. Every product must be the bits of the plain tiles; then a tiny model with every switch runs a few steps, whose outputs go to
// the file, as bits, to be compared with those of another instruction set.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "matrix.h"
#include "memory.h"
#include "model.h"
#include "rows.h"
#include "tiles_plain.h"

using namespace headrace::cpu;

namespace {

constexpr Format FORMATS[] = {Format::F32,  Format::F16,  Format::BF16, Format::Q8_0, Format::Q4_0,
                              Format::Q4_1, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q4_Z, Format::F8};

// Numbers that are the same everywhere.
class Random {
 public:
  uint32_t bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float value() { return static_cast<float>(bits() >> 8) / 8388608.0f - 1.0f; }
  std::vector<float> values(size_t count, float scale, float offset = 0.0f) {
    std::vector<float> out(count);
    for (float& x : out) x = value() * scale + offset;
    return out;
  }
  // Of either sign and one size, as large as `exponent` says.
  uint16_t half(uint16_t exponent) { return static_cast<uint16_t>(exponent | (bits() & 0x83ff)); }

 private:
  uint64_t state_ = 12345;
};

void put_half(uint8_t* at, uint16_t half) {
  std::memcpy(at, &half, 2);
}

void put_scales(Format format, uint8_t* block, Random& random) {
  constexpr uint16_t SMALL = 0x1800;  // 2^-9
  if (format == Format::F8) {
    const float scale = random.value() / 1024.0f;
    std::memcpy(block, &scale, 4);
    return;
  }
  put_half(block + (format == Format::Q6_K ? 208 : 0), random.half(SMALL));
  if (format == Format::Q4_Z) put_half(block + 2, 0xc700);  // -7
  if (format == Format::Q4_1 || format == Format::Q4_K || format == Format::Q5_K) put_half(block + 2, random.half(SMALL));
}

std::vector<uint8_t> raw_rows(Format format, int rows, int inputs, Random& random) {
  std::vector<uint8_t> raw(raw_row_bytes(format, inputs) * rows);
  const Block block = raw_block(format);
  for (uint8_t* at = raw.data(); at < raw.data() + raw.size(); at += block.bytes) {
    if (format == Format::F32) {
      const float value = random.value() / 8.0f;
      std::memcpy(at, &value, 4);
    } else if (format == Format::F16) {
      put_half(at, random.half(0x2c00));
    } else if (format == Format::BF16) {
      put_half(at, static_cast<uint16_t>(0x3d80 | (random.bits() & 0x807f)));
    } else {
      for (int i = 0; i < block.bytes; i++) at[i] = static_cast<uint8_t>(random.bits());
      put_scales(format, at, random);
    }
  }
  return raw;
}

using Product = void (*)(const Part*, int, int, const uint8_t*, Rounding, const float*, int, float*);

void plain_product(const Part& part, int inputs, const uint8_t* raw, Rounding rounding, const float* x, int rows, float* out) {
  Arena arena;
  Matrix matrix(&part, 1, inputs, arena);
  matrix.fill(0, part.rows, raw);
  const unsigned kinds = matrix.row_kinds(rounding);
  const Memory memory(Rows::bytes(rows, inputs, kinds, rounding));
  Rows panels(memory.data(), rows, inputs, kinds, rounding);
  for (int row = 0; row < rows; row++) panels.put(row, 0, inputs, x + static_cast<size_t>(row) * inputs);
  const TileFunction tile = plain::tile_of(part.format, rounding);
  const Region& region = matrix.regions()[0];
  for (int index = 0; index < panels.panels(); index++) {
    for (int strip = 0; strip < region.strips(); strip++) {
      alignas(LINE) float values[MAX_TILE_VECTORS * STRIP];
      const uint8_t* weights = region.strip(strip);
      tile(&weights, panels.panel(index), values);
      const int count = std::min(STRIP, part.rows - strip * STRIP);
      for (int row = panels.first_row(index); row < panels.end_row(index); row++) {
        std::memcpy(out + static_cast<size_t>(row) * part.rows + strip * STRIP, values + (row - panels.first_row(index)) * STRIP,
                    count * sizeof(float));
      }
    }
  }
}

bool check_products(Product product) {
  constexpr int OUTPUTS = 61;
  Random random;
  bool good = true;
  for (const Format format : FORMATS) {
    const int block = raw_block(format).inputs;
    const int inputs = block == SUPER ? 2 * SUPER : block == GROUP ? 7 * GROUP : 203;
    const Part part{format, OUTPUTS};
    const std::vector<uint8_t> raw = raw_rows(format, OUTPUTS, inputs, random);
    for (const Rounding rounding : {Rounding::FLOAT, Rounding::INT16, Rounding::INT8}) {
      for (int rows = 1; rows <= 14; rows++) {
        std::vector<float> x = random.values(static_cast<size_t>(rows) * inputs, 3.0f);
        for (int outlier = 0; outlier < rows; outlier++) x[random.bits() % x.size()] *= 40.0f;
        std::vector<float> want(static_cast<size_t>(rows) * OUTPUTS);
        std::vector<float> got(want.size());
        plain_product(part, inputs, raw.data(), rounding, x.data(), rows, want.data());
        product(&part, 1, inputs, raw.data(), rounding, x.data(), rows, got.data());
        if (std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) != 0) {
          std::printf("format %d, rounding %d, %d rows: not the bits of the plain tiles\n", static_cast<int>(format),
                      static_cast<int>(rounding), rows);
          good = false;
        }
      }
    }
  }
  return good;
}

// -- the step

constexpr int HIDDEN = 256, LAYERS = 3, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, INNER = 512, VOCAB = 97;
constexpr int Q_SIZE = HEADS * HEAD_DIM, KV_SIZE = KV_HEADS * HEAD_DIM;
constexpr int BLOCKS = 24, BLOCK_SIZE = 16, TABLE = 20;
constexpr int WINDOWS[LAYERS] = {0, 24, 0};
constexpr int ROPE_KINDS[LAYERS] = {0, 1, 0};

Config tiny_config(CacheFormat cache, Rounding rounding, Activation activation) {
  Config config;
  config.vocab_size = VOCAB;
  config.hidden_size = HIDDEN;
  config.num_layers = LAYERS;
  config.num_heads = HEADS;
  config.num_kv_heads = KV_HEADS;
  config.head_dim = HEAD_DIM;
  config.intermediate_size = INNER;
  config.activation = activation;
  config.windows = WINDOWS;
  config.rope_kinds = ROPE_KINDS;
  config.attn_scale = 0.125f;
  config.attn_softcap = 20.0f;
  config.embed_scale = 16.0f;
  config.residual_scale = 0.75f;
  config.logit_scale = 0.5f;
  config.logit_softcap = 30.0f;
  config.rounding = rounding;
  config.cache_format = cache;
  config.block_size = BLOCK_SIZE;
  config.threads = 2;
  return config;
}

void add(Model& model, int layer, MatrixName name, const std::vector<Part>& parts, int inputs, Random& random) {
  model.add_matrix(layer, name, parts.data(), static_cast<int>(parts.size()), inputs);
  int first_row = 0;
  for (const Part& part : parts) {
    model.fill(layer, name, first_row, part.rows, raw_rows(part.format, part.rows, inputs, random).data());
    first_row += part.rows;
  }
}

void set(Model& model, int layer, VectorName name, int count, float offset, Random& random) {
  model.set_vector(layer, name, random.values(count, 0.25f, offset).data(), count);
}

void load(Model& model, Random& random) {
  for (int kind = 0; kind < 2; kind++) {
    constexpr int POSITIONS = TABLE * BLOCK_SIZE;
    const std::vector<float> cos = random.values(POSITIONS * HEAD_DIM / 2, 1.0f);
    const std::vector<float> sin = random.values(POSITIONS * HEAD_DIM / 2, 1.0f);
    model.set_rope(kind, cos.data(), sin.data(), POSITIONS, HEAD_DIM);
  }
  add(model, -1, MatrixName::EMBEDDING, {{Format::F16, VOCAB}}, HIDDEN, random);
  add(model, -1, MatrixName::HEAD, {{Format::BF16, VOCAB}}, HIDDEN, random);
  set(model, -1, VectorName::FINAL_NORM, HIDDEN, 1.0f, random);
  for (int layer = 0; layer < LAYERS; layer++) {
    add(model, layer, MatrixName::QKV, {{Format::Q4_K, Q_SIZE}, {Format::F32, KV_SIZE}, {Format::Q6_K, KV_SIZE}}, HIDDEN, random);
    add(model, layer, MatrixName::O, {{Format::Q5_K, HIDDEN}}, Q_SIZE, random);
    add(model, layer, MatrixName::GATE_UP, {{Format::Q4_0, INNER}, {Format::Q4_1, INNER}}, HIDDEN, random);
    add(model, layer, MatrixName::DOWN, {{Format::Q8_0, HIDDEN}}, INNER, random);
    for (const VectorName norm : {VectorName::INPUT_NORM, VectorName::POST_ATTN_NORM, VectorName::MLP_NORM, VectorName::POST_MLP_NORM}) {
      set(model, layer, norm, HIDDEN, 1.0f, random);
    }
    set(model, layer, VectorName::Q_NORM, HEAD_DIM, 1.0f, random);
    set(model, layer, VectorName::K_NORM, HEAD_DIM, 1.0f, random);
    set(model, layer, VectorName::QKV_BIAS, Q_SIZE + 2 * KV_SIZE, 0.0f, random);
    set(model, layer, VectorName::O_BIAS, HIDDEN, 0.0f, random);
    set(model, layer, VectorName::GATE_UP_BIAS, 2 * INNER, 0.0f, random);
    set(model, layer, VectorName::DOWN_BIAS, HIDDEN, 0.0f, random);
  }
}

// Two sequences: one from its start, the other across the end of a part of attention (over empty pages).
class Steps {
 public:
  Steps(Model& model, int64_t block_bytes, std::FILE* file) : model_(model), file_(file) {
    for (int i = 0; i < 2 * LAYERS; i++) pages_.emplace_back(static_cast<size_t>(block_bytes) * BLOCKS);
    for (int i = 0; i < 2 * LAYERS; i++) (i < LAYERS ? keys_ : values_).push_back(pages_[i].data());
    for (int i = 0; i < 2 * TABLE; i++) tables_.push_back(i < TABLE ? i % 4 : 4 + (i * 7) % 20);
  }

  void run(const std::vector<int>& counts, Random& random) {
    std::vector<int32_t> ids, positions, starts{0};
    std::vector<int64_t> places;
    for (int seq = 0; seq < 2; seq++) {
      for (int i = 0; i < counts[seq]; i++) {
        const int position = next_[seq]++;
        ids.push_back(static_cast<int32_t>(random.bits() % VOCAB));
        positions.push_back(position);
        places.push_back(static_cast<int64_t>(tables_[seq * TABLE + position / BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE);
      }
      starts.push_back(static_cast<int32_t>(ids.size()));
    }
    const int32_t slots[] = {0, 1};
    std::vector<float> hidden(ids.size() * HIDDEN), logits(ids.size() * VOCAB);
    Step step;
    step.num_rows = static_cast<int>(ids.size());
    step.num_seqs = 2;
    step.token_ids = ids.data();
    step.positions = positions.data();
    step.slot_mapping = places.data();
    step.seq_slots = slots;
    step.query_start = starts.data();
    step.block_tables = tables_.data();
    step.table_stride = TABLE;
    step.keys = keys_.data();
    step.values = values_.data();
    step.hidden = hidden.data();
    step.logits = logits.data();
    model_.run(step);
    std::fwrite(hidden.data(), sizeof(float), hidden.size(), file_);
    std::fwrite(logits.data(), sizeof(float), logits.size(), file_);
  }

 private:
  Model& model_;
  std::FILE* file_;
  std::vector<Memory> pages_;
  std::vector<void*> keys_, values_;
  std::vector<int32_t> tables_;
  int next_[2] = {0, 250};
};

using MakeModel = Model* (*)(const Config&);

void write_steps(MakeModel make_model, std::FILE* file) {
  struct Case {
    CacheFormat cache;
    Rounding rounding;
    Activation activation;
  };
  constexpr Case CASES[] = {
      {CacheFormat::F32, Rounding::INT16, Activation::SILU},
      {CacheFormat::BF16, Rounding::INT8, Activation::GELU_TANH},
      {CacheFormat::INT8, Rounding::FLOAT, Activation::GELU},
  };
  for (const Case& one : CASES) {
    Random random;
    const Config config = tiny_config(one.cache, one.rounding, one.activation);
    Model* model = make_model(config);
    load(*model, random);
    Steps steps(*model, block_bytes(one.cache, BLOCK_SIZE, KV_HEADS, HEAD_DIM), file);
    steps.run({5, 11}, random);
    steps.run({30, 1}, random);
    for (int i = 0; i < 3; i++) steps.run({1, 1}, random);
    delete model;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 1) {
    for (const std::string& name : cpu_features()) std::printf("%s ", name.c_str());
    return 0;
  }
  if (count != 3) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("%s\n", dlerror());
    return 2;
  }
  const auto product = reinterpret_cast<Product>(dlsym(library, "headrace_product"));
  const auto make_model = reinterpret_cast<MakeModel>(dlsym(library, "headrace_make_model"));
  if (product == nullptr || make_model == nullptr) return 2;
  if (!check_products(product)) return 1;
  std::FILE* file = std::fopen(arguments[2], "wb");
  if (file == nullptr) return 2;
  write_steps(make_model, file);
  return std::fclose(file) == 0 ? 0 : 2;
}
