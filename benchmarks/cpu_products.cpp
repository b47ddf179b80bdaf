// The products of the native CPU step alone: nanoseconds a weight for each format, rounding and number of rows, with the share of
// the read bandwidth that one row reaches and the share of the instruction's rate that the most rows reach, both measured in this run.
//
//     cd src/headrace/csrc/cpu
//     FILES="tiles*.cpp rows.cpp pack.cpp quantize.cpp matrix.cpp"
//     g++ -O3 -std=c++20 -march=native -ffp-contract=off -w -pthread -I. ../../../../benchmarks/cpu_products.cpp $FILES -o cpu_products
//     THREADS=2 ./cpu_products [format] [outputs inputs]
//
// The weights of a point are copied until they fill 128 MB, so that one row reads memory and not a cache. A point is the
// best of many short runs: what a neighbour on the machine takes is not counted, but what it takes of the memory's bandwidth is.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpu_features.h"
#include "product.h"
#include "simd.h"

using namespace headrace::cpu;

namespace {

constexpr size_t WORKING_SET = 128 << 20;
constexpr double SECONDS = 0.3;  // a point
constexpr int ROWS[] = {1, 2, 4, 8, 16, 32, 128, 512};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Threads that spin between jobs: this measures products, not waking up.
class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; i++) {
      threads_.emplace_back([this, i] { work(i); });
    }
  }
  ~Team() {
    job_ = nullptr;
    turn_++;
    for (std::thread& thread : threads_) thread.join();
  }
  int size() const { return size_; }
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    left_ = size_ - 1;
    turn_++;
    job(0);
    while (left_.load() != 0) {
    }
  }

 private:
  void work(int index) {
    for (int seen = 0;;) {
      while (turn_.load() == seen) {
      }
      seen++;
      const auto* job = job_;
      if (job == nullptr) return;
      (*job)(index);
      left_--;
    }
  }
  const int size_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<int> turn_{0}, left_{0};
  std::vector<std::thread> threads_;
};

double best_seconds(Team& team, const std::function<void(int)>& job) {
  double best = 1e9;
  for (const double end = now() + SECONDS; now() < end;) {
    const double start = now();
    team.run(job);
    best = std::min(best, now() - start);
  }
  return best;
}

double read_bandwidth(Team& team) {
  const Memory memory(WORKING_SET);
  std::fill_n(memory.data(), memory.size(), 1);
  std::vector<float> sums(team.size() * STRIP);
  const size_t share = memory.size() / team.size() / 256 * 256;
  return share * team.size() / best_seconds(team, [&](int thread) {
           const float* at = reinterpret_cast<const float*>(memory.data() + thread * share);
           Vec sum[4] = {zero(), zero(), zero(), zero()};
           for (size_t i = 0; i < share / 4; i += 4 * STRIP) {
             for (int j = 0; j < 4; j++) sum[j] = max(sum[j], load(at + i + j * STRIP));
           }
           store(&sums[thread * STRIP], max(max(sum[0], sum[1]), max(sum[2], sum[3])));
         });
}

// Multiplications and additions a second of the instruction that a format's tiles live on; 0: not known here.
double peak(Team& team, Format format, Rounding rounding) {
  constexpr int TIMES = 200000;
  [[maybe_unused]] const bool ints = row_kind(format, rounding) == ROWS_INT;
#if defined(__AVX512VNNI__)
#define CHAINS(instruction)                                                                                         \
  for (int i = 0; i < TIMES; i++)                                                                                   \
    asm volatile(instruction " %%zmm0, %%zmm0, %%zmm1\n" instruction " %%zmm0, %%zmm0, %%zmm2\n" instruction        \
                 " %%zmm0, %%zmm0, %%zmm3\n" instruction " %%zmm0, %%zmm0, %%zmm4\n" instruction                    \
                 " %%zmm0, %%zmm0, %%zmm5\n" instruction " %%zmm0, %%zmm0, %%zmm6\n" instruction                    \
                 " %%zmm0, %%zmm0, %%zmm7\n" instruction " %%zmm0, %%zmm0, %%zmm8\n" instruction                    \
                 " %%zmm0, %%zmm0, %%zmm9\n" instruction " %%zmm0, %%zmm0, %%zmm10\n" ::                            \
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10")
  const double operations = ints ? 128 : row_kind(format, rounding) == ROWS_BF16 ? 64 : 32;
  const double seconds = best_seconds(team, [&](int) {
    asm volatile("vpxord %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
    if (ints) {
      CHAINS("vpdpbusd");
    } else if (row_kind(format, rounding) == ROWS_BF16) {
      CHAINS("vdpbf16ps");
    } else {
      CHAINS("vfmadd231ps");
    }
  });
  return operations * 10 * TIMES * team.size() / seconds * (rounding == Rounding::INT16 && ints ? 0.5 : 1);
#else
  return 0;
#endif
}

struct Point {
  double seconds;
  size_t bytes;
};

Point measure(Team& team, const std::vector<Matrix>& copies, Rounding rounding, int rows) {
  const int inputs = copies[0].inputs();
  const int outputs = copies[0].outputs();
  const unsigned kinds = copies[0].row_kinds(rounding);
  const Memory memory(Rows::bytes(rows, inputs, kinds, rounding));
  const Memory result(static_cast<size_t>(rows) * outputs * sizeof(float));
  Rows panels(memory.data(), rows, inputs, kinds, rounding);
  std::vector<float> x(inputs);
  for (int row = 0; row < rows; row++) {
    for (int k = 0; k < inputs; k++) x[k] = std::sin(1.7f * (row * inputs + k));
    panels.put(row, 0, inputs, x.data());
  }
  const int units = num_units(copies[0], panels);
  const int bite = units_per_bite(copies[0], panels, team.size());
  size_t turn = 0;
  const auto store_result = [&](int row, int output, int count, const float* values) {
    std::copy_n(values, count, result.as<float>() + static_cast<size_t>(row) * outputs + output);
  };
  std::atomic<int> next{0};
  const std::function<void(int)> job = [&](int) {
    for (int first; (first = next.fetch_add(bite)) < units;) {
      multiply(copies[turn % copies.size()], panels, first, std::min(units, first + bite), store_result);
    }
  };
  double best = 1e9;
  for (const double end = now() + SECONDS; now() < end; turn++) {
    next = 0;
    const double start = now();
    team.run(job);
    best = std::min(best, now() - start);
  }
  return {best, copies[0].bytes()};
}

void show(Team& team, double bandwidth, const char* name, Format format, Rounding rounding, int outputs, int inputs) {
  const Part part{format, outputs};
  Arena arena;
  std::vector<Matrix> copies;
  std::vector<uint8_t> raw(raw_row_bytes(format, inputs) * outputs);
  for (size_t i = 0; i < raw.size(); i++) raw[i] = i * 2654435761u >> 13 & 0x3f;
  const size_t count = std::max<size_t>(2, WORKING_SET / (strip_bytes(format, inputs) * outputs / STRIP));
  for (size_t i = 0; i < count; i++) {
    copies.emplace_back(&part, 1, inputs, arena);
    copies.back().fill(0, outputs, raw.data());
  }
  static constexpr const char* ROUNDINGS[] = {"FLOAT", "INT16", "INT8"};
  std::printf("%-5s %-5s", name, is_float(format) ? "" : ROUNDINGS[static_cast<int>(rounding)]);
  double share = 0;
  double rate = 0;
  for (const int rows : ROWS) {
    const Point point = measure(team, copies, rounding, rows);
    std::printf(" %d: %.4f", rows, point.seconds * 1e9 / outputs / inputs);
    std::fflush(stdout);
    if (rows == 1) share = point.bytes / point.seconds / bandwidth;
    rate = 2.0 * rows * outputs * inputs / point.seconds;
  }
  const double most = peak(team, format, rounding);
  std::printf("   1: %.0f%% of read bandwidth; %d: %.0f GOP/s", 100 * share, ROWS[std::size(ROWS) - 1], rate / 1e9);
  std::printf(most > 0 ? ", %.0f%% of peak\n" : "\n", 100 * rate / most);
}

}  // namespace

int main(int count, char** arguments) {
  cpu_features();  // asks the system for AMX's registers
  const char* threads = std::getenv("THREADS");
  Team team(threads == nullptr ? std::max(1u, std::thread::hardware_concurrency()) : std::max(1, std::atoi(threads)));
  const std::string only = count > 1 ? arguments[1] : "";
  const int outputs = count > 3 ? std::atoi(arguments[2]) : 3072;
  const int inputs = count > 3 ? std::atoi(arguments[3]) : 768;
  const double bandwidth = read_bandwidth(team);
  std::printf("%d threads, reads %.1f GB/s; %d outputs of %d inputs; ns a weight by rows\n", team.size(), bandwidth / 1e9, outputs, inputs);
  const std::pair<const char*, Format> formats[] = {
      {"F32", Format::F32},   {"F16", Format::F16},   {"BF16", Format::BF16}, {"Q8_0", Format::Q8_0}, {"Q4_0", Format::Q4_0},
      {"Q4_1", Format::Q4_1}, {"Q4_K", Format::Q4_K}, {"Q5_K", Format::Q5_K}, {"Q6_K", Format::Q6_K}};
  for (const auto& [name, format] : formats) {
    if ((!only.empty() && only != name) || inputs % raw_block(format).inputs != 0) continue;
    if (!is_float(format)) show(team, bandwidth, name, format, Rounding::INT8, outputs, inputs);
    show(team, bandwidth, name, format, Rounding::INT16, outputs, inputs);
  }
}
