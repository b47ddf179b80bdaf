// What the binding and the libraries of the instruction sets share: plain structs, and one abstract class.
//
// The binding is compiled for the baseline, each library for one instruction set; nothing with a layout of its own crosses
// the border (no containers, no strings), and nothing here computes. Errors are std::exception.
#pragma once

#include <cstdint>

namespace headrace::cpu {

// Of this file: a library whose headrace_step_abi() says something else was built for another version and is not used.
inline constexpr int STEP_ABI = 3;

// Rows of weights as GGUF and safetensors store them, and two for what is quantized in safetensors (blocks of 32 inputs):
//   Q4_Z   half scale, half addend, nibbles as Q4_1's: w = scale * (nibble + addend), the addend a zero point below zero
//   F8     float scale, 32 bytes of e4m3: w = scale * e4m3
enum class Format : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q4_Z, F8 };

// What the inputs of a product with integer weights are rounded to, in groups of 32 with one scale each. Float weights
// ignore it: F32 and F16 x float32, BF16 x bfloat16 where the CPU has such products, else x float32.
enum class Rounding : int { FLOAT, INT16, INT8 };

enum class CacheFormat : int { F32, BF16, INT8 };

enum class Activation : int { SILU, GELU_TANH, GELU };

// EMBEDDING, HEAD: of the model (layer -1); without EMBEDDING the head's rows are it (tied).
enum class MatrixName : int { QKV, O, GATE_UP, DOWN, HEAD, EMBEDDING };
inline constexpr int NUM_LAYER_MATRICES = 4;

// FINAL_NORM: of the model (layer -1).
enum class VectorName : int {
  INPUT_NORM,
  POST_ATTN_NORM,
  MLP_NORM,
  POST_MLP_NORM,
  Q_NORM,  // head_dim values: a norm for each head; q_size of them: one over the whole projection
  K_NORM,
  QKV_BIAS,
  O_BIAS,
  GATE_UP_BIAS,
  DOWN_BIAS,
  FINAL_NORM,
};
inline constexpr int NUM_LAYER_VECTORS = 10;

// Rows of one matrix that were one tensor in the file: q, k and v, or gate and up.
struct Part {
  Format format;
  int rows;
};

// headrace.model.config.ModelConfig as far as the step reads it. Norms, biases and a tied head are there if their vectors
// and matrices are; the norm's offset is added to the vectors by the caller.
struct Config {
  int vocab_size = 0;
  int hidden_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;  // even, up to 256
  int intermediate_size = 0;
  float norm_eps = 1e-6f;
  Activation activation = Activation::SILU;
  const int* windows = nullptr;    // [num_layers], 0: all positions; null: all positions in every layer. Copied.
  const int* rope_kinds = nullptr;  // [num_layers], 0 or 1: which of set_rope's tables; null: 0 in every layer. Copied.
  float attn_scale = 0.0f;
  float attn_softcap = 0.0f;  // 0: none
  float embed_scale = 1.0f;   // rounded to the checkpoint's dtype by the caller
  float residual_scale = 1.0f;
  float logit_scale = 1.0f;
  float logit_softcap = 0.0f;  // 0: none
  Rounding rounding = Rounding::INT16;
  CacheFormat cache_format = CacheFormat::F32;
  int block_size = 16;  // a multiple of 16
  int threads = 1;
};

// Bytes of keys (and again of values) of one block of one layer. A tensor of [blocks, block_size, kv_heads, head_dim] has
// as many in float32 and bfloat16; INT8 keeps a float32 scale for every (position, head) beside its bytes.
inline int64_t block_bytes(CacheFormat format, int block_size, int num_kv_heads, int head_dim) {
  const int64_t heads = static_cast<int64_t>(block_size) * num_kv_heads;
  switch (format) {
    case CacheFormat::F32:
      return heads * head_dim * 4;
    case CacheFormat::BF16:
      return heads * head_dim * 2;
    default:
      return heads * (head_dim + 4);
  }
}

// One step of the engine, as headrace.model.batch.ForwardBatch has it: sequences of adjacent rows at consecutive positions.
// Several sequences may be of one slot (drafts): rows see the keys of all rows of the step at positions up to theirs.
struct Step {
  int num_rows = 0;
  int num_seqs = 0;
  const int32_t* token_ids = nullptr;     // [num_rows]
  const int32_t* positions = nullptr;     // [num_rows]
  const int64_t* slot_mapping = nullptr;  // [num_rows]: block * block_size + offset; -1 writes nothing
  const int32_t* seq_slots = nullptr;     // [num_seqs]: the sequence's row of block_tables
  const int32_t* query_start = nullptr;   // [num_seqs + 1]: its rows are query_start[s] .. query_start[s + 1]
  const int32_t* block_tables = nullptr;
  int64_t table_stride = 0;       // elements from one row of block_tables to the next
  void* const* keys = nullptr;    // [num_layers]: the blocks of a layer, block_bytes() each; 64 byte aligned is fastest
  void* const* values = nullptr;  // [num_layers]
  const int64_t* wanted = nullptr;  // [num_wanted]: rows whose outputs somebody reads; null: all, num_wanted is ignored
  int num_wanted = 0;
  float* hidden = nullptr;  // out: [wanted rows, hidden_size] after the final norm, or null
  float* logits = nullptr;  // out: [wanted rows, vocab_size], or null
};

// Rows of logits from which one token each is drawn: headrace.sampling.sampler.SampleInputs, without edits.
struct Draws {
  int num_rows = 0;
  const float* logits = nullptr;           // [num_rows, vocab_size]
  const float* temperature = nullptr;      // [num_rows], as all below; less than greedy_eps: the largest logit
  const int32_t* top_k = nullptr;          // <= 0: all
  const float* top_p = nullptr;            // >= 1: all
  const float* min_p = nullptr;            // <= 0: all
  const int64_t* seed = nullptr;
  const int64_t* output_index = nullptr;
  const int32_t* sample_index = nullptr;
  float greedy_eps = 0.0f;
  int32_t* ids = nullptr;   // out
  bool* failed = nullptr;   // out: the largest logit is not finite; the id is 0
};

// One model. Loading calls may run at once for different rows; one step at a time.
class Model {
 public:
  virtual ~Model() = default;

  // `inputs`: elements of a row. Before any fill of it.
  virtual void add_matrix(int layer, MatrixName name, const Part* parts, int num_parts, int inputs) = 0;

  // Packs `num_rows` rows as the file has them, from `first_row` of the whole matrix on. Begins at a multiple of 16 rows
  // within a part, and is a multiple of 16 rows or goes to the part's end.
  virtual void fill(int layer, MatrixName name, int first_row, int num_rows, const uint8_t* raw) = 0;

  virtual void set_vector(int layer, VectorName name, const float* values, int count) = 0;

  // cos and sin [positions, dim / 2] of the first `dim` dimensions of a head, as headrace.model.rope makes them. `kind`: 0, 1.
  virtual void set_rope(int kind, const float* cos, const float* sin, int positions, int dim) = 0;

  virtual void run(const Step& step) = 0;

  // hidden [rows, hidden_size] -> out [rows, vocab_size], scaled and capped: the bits that `run` gives.
  virtual void logits(const float* hidden, int rows, float* out) = 0;

  virtual void sample(const Draws& draws) = 0;

  // Of weights and rope tables.
  virtual int64_t bytes() const = 0;

  // Of buffers, which stay, that steps of up to `rows` rows, `wanted` of them wanted, at positions below `max_positions` need.
  virtual int64_t workspace_bytes(int rows, int wanted, int max_positions) const = 0;

  // The instruction set that this library is compiled for. Static.
  virtual const char* describe() const = 0;
};

}  // namespace headrace::cpu

// What a library exports; everything else in it is hidden. Throws std::invalid_argument if the config cannot be run.
extern "C" {
__attribute__((visibility("default"))) headrace::cpu::Model* headrace_make_model(const headrace::cpu::Config& config);
__attribute__((visibility("default"))) int headrace_step_abi();
}
