// One row of logits to one token id: the stages of headrace.sampling.sampler, which says what they are and why.
//
// Sums run in a fixed order over the row alone, so its id is the same in any batch. Weights below e^-87 count as 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "model.h"
#include "philox.h"
#include "simd.h"

namespace headrace::cpu {

inline constexpr int SUM_BLOCK = 512;  // ids per partial sum of the inverse CDF

// A thread draws one row after another in it.
class RowDraw {
 public:
  explicit RowDraw(int vocab) : vocab_(vocab), blocks_((vocab + SUM_BLOCK - 1) / SUM_BLOCK), weights_(vocab), sums_(blocks_) {}

  static int64_t bytes(int vocab) { return int64_t{vocab} * 3 * sizeof(float); }

  // Sets ids[row] and failed[row].
  void draw(const Draws& draws, int row) {
    x_ = draws.logits + static_cast<size_t>(row) * vocab_;
    const bool usable = find_largest();
    draws.failed[row] = !usable;
    draws.ids[row] = 0;
    if (!usable) return;
    const float temperature = draws.temperature[row];
    if (temperature < draws.greedy_eps) {
      draws.ids[row] = first_largest();
      return;
    }
    inverse_ = 1.0f / temperature;
    const float min_p = draws.min_p[row];
    weigh(min_p > 0.0f ? std::log(min_p) : -std::numeric_limits<float>::infinity());
    const int top_k = draws.top_k[row];
    if (top_k > 0 && top_k < vocab_) keep(top_k_threshold(top_k));
    if (draws.top_p[row] < 1.0f) keep(top_p_threshold(draws.top_p[row]));
    draws.ids[row] = inverse_cdf(uniform(draws.seed[row], draws.output_index[row], draws.sample_index[row]));
  }

 private:
  struct Candidate {
    float score, weight;
  };

  // work(block, first, last): first and last of its ids.
  template <class Work>
  HEADRACE_INLINE void each_block(Work work) const {
    for (int b = 0; b < blocks_; b++) work(b, b * SUM_BLOCK, std::min(vocab_, (b + 1) * SUM_BLOCK));
  }

  HEADRACE_INLINE static Vec load_up_to(const float* p, int i, int last, float other) {
    const int n = last - i;
    return n >= LANES ? load(p + i) : keep_lanes(load_first(p + i, n), 0, n, set1(other));
  }

  HEADRACE_INLINE Vec scores(int i, int last) const {
    const Vec x = load_up_to(x_, i, last, -std::numeric_limits<float>::infinity());
    return mul(sub(x, set1(largest_)), set1(inverse_));
  }

  // False if the largest is not finite, a NaN among them.
  bool find_largest() {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    Vec bad = zero();
    largest_ = -infinity;
    each_block([&](int b, int first, int last) {
      Vec most = set1(-infinity);
      for (int i = first; i < last; i += LANES) {
        const Vec x = load_up_to(x_, i, last, -infinity);
        bad = max(bad, select_less(x, set1(infinity), zero(), set1(1.0f)));  // +inf and NaN are not less
        most = max(x, most);
      }
      sums_[b] = reduce_max(most);
      largest_ = std::max<float>(largest_, sums_[b]);
    });
    return reduce_max(bad) == 0.0f && largest_ > -infinity;
  }

  // The lowest id of the largest logit, after find_largest.
  int first_largest() const {
    const auto block = std::find(sums_.begin(), sums_.end(), largest_) - sums_.begin();
    return static_cast<int>(std::find(x_ + block * SUM_BLOCK, x_ + vocab_, largest_) - x_);
  }

  // weight = e^score, 0 where the score is below `threshold`; and their sums.
  void weigh(float threshold) {
    const Vec least = set1(std::max(threshold, -87.0f));
    each_block([&](int b, int first, int last) {
      Vec sum = zero();
      for (int i = first; i < last; i += LANES) {
        const Vec y = scores(i, last);
        const Vec w = select_less(y, least, zero(), exp(y));
        put(i, last, w);
        sum = add(sum, w);
      }
      sums_[b] = reduce_add(sum);
    });
  }

  // Drops what scores less.
  void keep(float threshold) {
    const Vec least = set1(threshold);
    each_block([&](int b, int first, int last) {
      if (sums_[b] == 0.0) return;
      Vec sum = zero();
      for (int i = first; i < last; i += LANES) {
        const Vec w = select_less(scores(i, last), least, zero(), load_up_to(weights_.data(), i, last, 0.0f));
        put(i, last, w);
        sum = add(sum, w);
      }
      sums_[b] = reduce_add(sum);
    });
  }

  HEADRACE_INLINE void put(int i, int last, Vec w) {
    if (last - i >= LANES) {
      store(weights_.data() + i, w);
    } else {
      store_first(weights_.data() + i, w, last - i);
    }
  }

  // All ids whose weight is at least `floor` > 0.
  void collect(float floor) {
    candidates_.clear();
    each_block([&](int b, int first, int last) {
      if (sums_[b] < floor) return;
      for (int i = first; i < last; i += LANES) {
        if (reduce_max(load_up_to(weights_.data(), i, last, 0.0f)) < floor) continue;
        for (int j = i; j < std::min(last, i + LANES); j++) {
          if (weights_[j] >= floor) candidates_.push_back({(x_[j] - largest_) * inverse_, weights_[j]});
        }
      }
    });
  }

  // The k-th largest score. No less than the k-th largest of groups' maxima, so only what is above that is looked at.
  float top_k_threshold(int k) {
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    groups_.clear();
    for (int i = 0; i < vocab_; i += LANES) groups_.push_back(reduce_max(scores(i, vocab_)));
    if (k > static_cast<int>(groups_.size())) {
      groups_.clear();
      for (int i = 0; i < vocab_; i++) groups_.push_back((x_[i] - largest_) * inverse_);
      return largest_but(k - 1);
    }
    const float floor = largest_but(k - 1);
    if (floor == nothing) return nothing;
    groups_.clear();
    for (int i = 0; i < vocab_; i++) {
      const float y = (x_[i] - largest_) * inverse_;
      if (y >= floor) groups_.push_back(y);
    }
    return largest_but(k - 1);
  }

  float largest_but(int n) {
    std::nth_element(groups_.begin(), groups_.begin() + n, groups_.end(), std::greater<>());
    return groups_[n];
  }

  // The largest score v for which the weights of all scores >= v reach p of the whole. Weights below (1 - p) / vocab of it
  // cannot make up what may be dropped, so v lies above them; 0.99: rounding must not lose an id.
  float top_p_threshold(float p) {
    const double total = whole();
    const double wanted = static_cast<double>(p) * total;
    const double floor = (1.0 - static_cast<double>(p)) * total / vocab_ * 0.99;
    collect(std::max(static_cast<float>(floor), std::numeric_limits<float>::min()));
    auto first = candidates_.begin(), last = candidates_.end();
    double above = 0.0;
    float threshold = 0.0f;  // of the largest, which always stays
    while (first != last) {  // the one that is sought lies in [first, last), or before it all if rounding lost the sum
      const float pivot = median(first->score, (first + (last - first) / 2)->score, (last - 1)->score);
      const auto equal = std::partition(first, last, [&](const Candidate& c) { return c.score > pivot; });
      const auto below = std::partition(equal, last, [&](const Candidate& c) { return c.score == pivot; });
      const double greater = sum(first, equal);
      if (equal != first && above + greater >= wanted) {
        last = equal;
        continue;
      }
      threshold = pivot;
      above += greater + sum(equal, below);
      if (above >= wanted) break;
      first = below;
    }
    return threshold;
  }

  static float median(float a, float b, float c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }

  static double sum(std::vector<Candidate>::iterator first, std::vector<Candidate>::iterator last) {
    double total = 0.0;
    for (; first != last; ++first) total += first->weight;
    return total;
  }

  double whole() const {
    double total = 0.0;
    for (double sum : sums_) total += sum;
    return total;
  }

  // The first id at which the running sum of weights exceeds u of the whole; the last one with a weight, where rounding left
  // more of it than a block has.
  int inverse_cdf(float u) const {
    const double target = static_cast<double>(u) * whole();
    double before = 0.0;
    int block = 0;
    while (block + 1 < blocks_ && before + sums_[block] <= target) before += sums_[block++];
    const double rest = target - before;
    double running = 0.0;
    int last = block * SUM_BLOCK;
    for (int i = block * SUM_BLOCK; i < std::min(vocab_, (block + 1) * SUM_BLOCK); i++) {
      if (weights_[i] == 0.0f) continue;
      last = i;
      running += weights_[i];
      if (running > rest) break;
    }
    return last;
  }

  const int vocab_, blocks_;
  const float* x_ = nullptr;
  float largest_ = 0.0f, inverse_ = 1.0f;
  std::vector<float> weights_;
  std::vector<double> sums_;  // of the blocks' weights; at first their largest logits
  std::vector<Candidate> candidates_;
  std::vector<float> groups_;
};

}  // namespace headrace::cpu
