// A model as it is loaded: matrices, vectors and rope tables by name.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "matrix.h"
#include "model.h"
#include "rope.h"

namespace headrace::cpu {

struct Layer {
  Matrix matrices[NUM_LAYER_MATRICES];
  std::vector<float> vectors[NUM_LAYER_VECTORS];  // empty where the model has none
  int window = 0;
  int rope_kind = 0;

  const Matrix& matrix(MatrixName name) const { return matrices[static_cast<int>(name)]; }
  const std::vector<float>& vector(VectorName name) const { return vectors[static_cast<int>(name)]; }
};

class Weights {
 public:
  explicit Weights(const Config& config) : layers_(config.num_layers) {
    for (int i = 0; i < config.num_layers; i++) {
      if (config.windows != nullptr) layers_[i].window = config.windows[i];
      if (config.rope_kinds != nullptr) layers_[i].rope_kind = config.rope_kinds[i];
    }
  }

  const std::vector<Layer>& layers() const { return layers_; }
  const Matrix& head() const { return head_; }
  const Matrix& embedding() const { return embedding_.empty() ? head_ : embedding_; }
  const std::vector<float>& final_norm() const { return final_norm_; }
  const Rope& rope(int kind) const { return ropes_[kind]; }

  Arena& arena() { return arena_; }

  Matrix& matrix(int layer, MatrixName name) {
    if (name == MatrixName::HEAD) return head_;
    if (name == MatrixName::EMBEDDING) return embedding_;
    return layers_.at(layer).matrices[static_cast<int>(name)];
  }

  std::vector<float>& vector(int layer, VectorName name) {
    if (name == VectorName::FINAL_NORM) return final_norm_;
    return layers_.at(layer).vectors[static_cast<int>(name)];
  }

  void set_rope(int kind, const float* cos, const float* sin, int positions, int dim) {
    if (kind != 0 && kind != 1) throw std::invalid_argument("rope kind " + std::to_string(kind) + ": 0 or 1");
    Rope& rope = ropes_[kind];
    const size_t count = static_cast<size_t>(positions) * (dim / 2);
    rope.half = dim / 2;
    rope.positions = positions;
    rope.cos.assign(cos, cos + count);
    rope.sin.assign(sin, sin + count);
  }

  template <class Function>
  void each_matrix(Function function) const {
    for (const Layer& layer : layers_) {
      for (const Matrix& matrix : layer.matrices) function(matrix);
    }
    function(head_);
    function(embedding_);
  }

  int64_t bytes() const {
    int64_t total = 0;
    each_matrix([&](const Matrix& matrix) { total += static_cast<int64_t>(matrix.bytes()); });
    for (const Layer& layer : layers_) {
      for (const std::vector<float>& vector : layer.vectors) total += vector.size() * sizeof(float);
    }
    for (const Rope& rope : ropes_) total += (rope.cos.size() + rope.sin.size()) * sizeof(float);
    return total + final_norm_.size() * sizeof(float);
  }

 private:
  Arena arena_;  // where the matrices' weights lie
  std::vector<Layer> layers_;
  Matrix head_, embedding_;
  std::vector<float> final_norm_;
  Rope ropes_[2];
};

}  // namespace headrace::cpu
