// The step's own threads, and how they share the work of a phase.
//
// A step is one function that every thread runs from start to end; `share` divides the items of a phase and ends at a
// barrier. Each thread owns a range of the items and takes it in bites; done with it, it takes bites of the others' ranges.
//
// WAITING. Spin for a while, then sleep. A sleeping waiter leaves its core empty, and the kernel moves the runnable thread
// that it waits for there; a spinning one keeps that core busy with nothing while the other is queued behind a stranger.
// Between steps sleep nearly at once: whom the caller tells of a step then runs on that core, not in the caller's place.
// Who waits on the core where another was last seen sleeps nearly at once, too: where a stranger has taken a core, as a server
// does at the beginning of each step, two threads share one until the kernel parts them. Threads are not bound to cores: a
// bound one would wait for the stranger while another core is empty, or for the thread of another engine bound to the same.
//
// Results do not depend on the number of threads, so it may change from step to step: thread_choice.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "thread_choice.h"

namespace headrace::cpu {

inline constexpr int CACHE_LINE = 64;

// Waiting for a number to change.
class Gate {
 public:
  int value() const { return value_.load(std::memory_order_relaxed); }
  void open();
  // Whether the number is no longer `seen` after at most `spin`.
  bool opens(int seen, std::chrono::microseconds spin) const;
  // Until it is not.
  void sleep(int seen);

 private:
  alignas(CACHE_LINE) std::atomic<int> value_{0};
  alignas(CACHE_LINE) std::atomic<int> asleep_{0};
};

class Pool;

// One thread's part in a step.
class Worker {
 public:
  Worker(Pool& pool, int index, int threads) : pool_(pool), index_(index), threads_(threads) {}

  int index() const { return index_; }
  int threads() const { return threads_; }

  // work(first, last) for all items, in bites of `bite` items; returns when all threads are done. `even`: no bite takes
  // long, so a long wait is a stall.
  template <class Work>
  void share(int items, int bite, Work work, bool even = true);

  void barrier(bool even = true);

 private:
  Pool& pool_;
  const int index_;
  const int threads_;
  int phase_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(counters_.size()); }

  // step(worker) on every thread that takes part; the caller is one. `alike`: rows of a step that may be compared with other such
  // ones, for the choice of threads; 0: it may not.
  template <class Function>
  void run(int alike, Function& step) {
    run(alike, [](void* context, Worker& worker) { (*static_cast<Function*>(context))(worker); }, &step);
  }

 private:
  friend class Worker;
  using Call = void (*)(void*, Worker&);
  static constexpr int PHASES = 4;  // counters that are in use, being cleared, and clear

  struct alignas(CACHE_LINE) Counters {
    std::atomic<int> next[PHASES];
    std::atomic<int> core;  // where its thread was last seen
  };

  void run(int alike, Call call, void* context);
  void start();
  void serve(int index);
  void arrive(int index, bool even);
  bool is_in_the_way(int index);

  std::vector<Counters> counters_;
  std::unique_ptr<Gate[]> start_gates_;
  std::vector<std::thread> workers_;  // started by the first step, asleep between steps
  ThreadChoice choice_;
  Gate barrier_;
  alignas(CACHE_LINE) std::atomic<int> missing_{0};  // at the barrier
  alignas(CACHE_LINE) std::atomic<int64_t> stalled_{0};  // nanoseconds that threads waited for one that lost its core
  std::atomic<bool> closing_{false};
  bool started_ = false;
  int running_ = 1;
  Call call_ = nullptr;
  void* context_ = nullptr;
};

template <class Work>
void Worker::share(int items, int bite, Work work, bool even) {
  if (threads_ == 1) {
    if (items > 0) work(0, items);
    return;
  }
  const int bites = (items + bite - 1) / bite;
  const int slot = phase_ & (Pool::PHASES - 1);
  for (int i = 0; i < threads_; i++) {
    const int owner = (index_ + i) % threads_;
    const int first = static_cast<int>(static_cast<int64_t>(bites) * owner / threads_);
    const int last = static_cast<int>(static_cast<int64_t>(bites) * (owner + 1) / threads_);
    std::atomic<int>& next = pool_.counters_[owner].next[slot];
    for (;;) {
      const int taken = first + next.fetch_add(1, std::memory_order_relaxed);
      if (taken >= last) break;
      work(taken * bite, std::min(items, (taken + 1) * bite));
    }
  }
  barrier(even);
}

inline void Worker::barrier(bool even) {
  if (threads_ == 1) return;
  // nobody takes from it before two barriers from here, and nobody did since two barriers ago
  pool_.counters_[index_].next[(phase_ + 2) & (Pool::PHASES - 1)].store(0, std::memory_order_relaxed);
  phase_++;
  pool_.arrive(index_, even);
}

}  // namespace headrace::cpu
