// Waiting, the number of threads, and their life.
#include "pool.h"

#include <climits>
#include <cstdint>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace::cpu {

namespace {

using std::chrono::microseconds;
using Clock = std::chrono::steady_clock;

constexpr microseconds SPIN{50};
constexpr microseconds SHORT_SPIN{5};  // between steps, and before a thread looks whether it is in another's way
constexpr microseconds STALL{1000};
constexpr int SPINS_A_LOOK = 16;  // at the clock

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// While it lives, the thread rounds to the nearest and keeps denormals, whatever its caller had asked of it (and a new thread
// has from its maker): all threads of a step give the same bits.
class DefaultFloats {
 public:
  DefaultFloats() : before_(mode()) { set(DEFAULT); }
  ~DefaultFloats() { set(before_); }
  DefaultFloats(const DefaultFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t DEFAULT = 0x1f80;  // all exceptions masked
  static uint64_t mode() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#else
  static constexpr uint64_t DEFAULT = 0;
  static uint64_t mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#endif
  const uint64_t before_;
};

// The one that the thread runs on; -1: who knows.
int core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

void sleep_while(std::atomic<int>& value, int seen) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<int*>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  value.wait(seen);
#endif
}

void wake_all(std::atomic<int>& value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<int*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  value.notify_all();
#endif
}

}  // namespace

void Gate::open() {
  value_.fetch_add(1);
  if (asleep_.load()) wake_all(value_);
}

bool Gate::opens(int seen, std::chrono::microseconds spin) const {
  if (value_.load(std::memory_order_acquire) != seen) return true;
  const Clock::time_point begin = Clock::now();
  for (int spins = 1;; spins++) {
    if (value_.load(std::memory_order_acquire) != seen) return true;
    relax();
    if (spins % SPINS_A_LOOK == 0 && Clock::now() - begin > spin) return false;
  }
}

void Gate::sleep(int seen) {
  asleep_.fetch_add(1);
  while (value_.load() == seen) sleep_while(value_, seen);
  asleep_.fetch_sub(1);
}

Pool::Pool(int threads)
    : counters_(std::max(1, threads)), start_gates_(new Gate[counters_.size()]), choice_(this->threads()) {
  for (Counters& counters : counters_) {
    for (std::atomic<int>& next : counters.next) next = 0;
    counters.core = -1;
  }
}

Pool::~Pool() {
  closing_ = true;
  for (size_t i = 0; i < workers_.size(); i++) start_gates_[i + 1].open();
  for (std::thread& worker : workers_) worker.join();
}

// Where the system gives no more threads the step runs on those that there are.
void Pool::start() {
  try {
    for (int i = 1; i < threads(); i++) {
      workers_.emplace_back([this, i] { serve(i); });
    }
  } catch (const std::system_error&) {
  }
}

void Pool::serve(int index) {
  const DefaultFloats floats;
  for (int seen = 0;; seen++) {
    if (!start_gates_[index].opens(seen, SHORT_SPIN)) start_gates_[index].sleep(seen);
    if (closing_) return;
    counters_[index].core.store(core(), std::memory_order_relaxed);
    Worker worker(*this, index, running_);
    call_(context_, worker);
    arrive(index, false);
  }
}

void Pool::run(int alike, Call call, void* context) {
  const DefaultFloats floats;
  if (!started_) start();
  started_ = true;
  call_ = call;
  context_ = context;
  running_ = std::min(choice_.threads(), static_cast<int>(workers_.size()) + 1);
  missing_ = running_;
  stalled_ = 0;
  for (Counters& counters : counters_) {
    for (std::atomic<int>& next : counters.next) next.store(0, std::memory_order_relaxed);
  }
  counters_[0].core.store(core(), std::memory_order_relaxed);
  const Clock::time_point begin = Clock::now();
  for (int i = 1; i < running_; i++) start_gates_[i].open();
  Worker worker(*this, 0, running_);
  call(context, worker);
  if (running_ > 1) arrive(0, false);  // no thread reads what this step set once it is past here
  if (alike == 0) return;
  const Clock::time_point end = Clock::now();
  const int waiting = std::max(1, running_ - 1);  // all but one wait for the one that lost its core
  choice_.learn(alike, end - begin, std::chrono::nanoseconds(stalled_ / waiting), end);
}

void Pool::arrive(int index, bool even) {
  const int seen = barrier_.value();
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    missing_.store(running_, std::memory_order_relaxed);
    barrier_.open();
    return;
  }
  if (barrier_.opens(seen, SHORT_SPIN)) return;
  if (!is_in_the_way(index) && barrier_.opens(seen, SPIN)) return;
  const Clock::time_point begin = Clock::now();
  barrier_.sleep(seen);
  const Clock::duration slept = Clock::now() - begin;
  if (even && slept > STALL) stalled_.fetch_add(std::chrono::nanoseconds(slept).count(), std::memory_order_relaxed);
}

// Of a thread that was last seen on the same core and may be queued there.
bool Pool::is_in_the_way(int index) {
  const int mine = core();
  counters_[index].core.store(mine, std::memory_order_relaxed);
  for (int i = 0; i < running_ && mine >= 0; i++) {
    if (i != index && counters_[i].core.load(std::memory_order_relaxed) == mine) return true;
  }
  return false;
}

}  // namespace headrace::cpu
