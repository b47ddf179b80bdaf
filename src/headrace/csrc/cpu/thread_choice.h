// How many of a step's threads run it: fewer while strangers use the cores.
//
// Who waits for a thread that lost its core loses whole slices of the scheduler (milliseconds); a step with one thread less
// loses 1 / threads. A stranger who wants a core all the time gets it at once. Where less is lost, which is less is not guessed but
// tried: a few steps run with one thread less, and the faster number stays. So a process that takes a core for a moment in every
// step, such as the server that sends the tokens, does not cost a thread. While some stay away, one is tried again now and then.
// What was tried in vain is tried again later and later, and breaks off as soon as it is plainly slower; at once, when steps have
// twice the rows: what one row lost by a thread, eight may win.
#pragma once

#include <algorithm>
#include <chrono>

namespace headrace::cpu {

class ThreadChoice {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ThreadChoice(int threads) : threads_(threads) {}

  // Of the next step.
  int threads() const { return threads_ - fewer_; }

  // After a step of so many rows, which ended `now`, took `step` and lost `stalled` of it.
  void learn(int rows, Clock::duration step, Clock::duration stalled, Clock::time_point now) {
    if (threads_ == 1) return;
    if (settling_ > 0) {
      settling_--;
      return;
    }
    steps_++;
    rows_ = steps_ == 1 ? rows : std::min(rows_, rows);
    work_ += rows + ALWAYS;
    time_ += step;
    stalled_ += stalled;
    if (trial_ != 0) return judge(now);
    if (steps_ < WINDOW) return;
    const double lost = threads() == 1 ? 0 : static_cast<double>(stalled_.count()) * threads() / time_.count();
    if (lost > CERTAIN) {
      fewer_++;
      return wait(FIRST_PAUSE, now);
    }
    const bool due = now >= next_trial_ || rows_ >= 2 * tried_rows_;
    if (due && (lost > SUSPICIOUS || fewer_ > 0)) return begin(lost > SUSPICIOUS ? 1 : -1);
    new_window();
  }

 private:
  static constexpr int WINDOW = 16;  // steps that are looked at together
  static constexpr int TRIAL = 8;
  static constexpr int SETTLING = 4;  // until the kernel has moved others to the core of a thread that stays away
  static constexpr int FEWEST = 3;  // steps that show what is plainly slower
  static constexpr double PLAINLY = 1.1;
  // Lost in stalls, of the 1 / threads of a step that a thread does.
  static constexpr double SUSPICIOUS = 0.2;
  static constexpr double CERTAIN = 0.8;  // shorter waits, which are not counted, lose the rest
  static constexpr int ALWAYS = 4;  // rows whose work a step takes to read the weights, whatever its rows are
  static constexpr Clock::duration FIRST_PAUSE = std::chrono::milliseconds(60);  // most strangers are gone soon
  static constexpr Clock::duration LONGEST_WITH_ALL = std::chrono::seconds(1);
  static constexpr Clock::duration LONGEST_WITH_FEWER = std::chrono::seconds(8);

  double pace() const { return static_cast<double>(time_.count()) / work_; }

  void begin(int fewer) {
    before_ = pace();
    trial_ = fewer;
    fewer_ += fewer;
    if (fewer > 0) settling_ = SETTLING;
    new_window();
  }

  void judge(Clock::time_point now) {
    const bool slow = steps_ >= FEWEST && pace() > PLAINLY * before_;
    if (!slow && steps_ < TRIAL) return;
    const bool better = pace() < before_;
    if (!better) fewer_ -= trial_;
    wait(better ? FIRST_PAUSE : std::min(4 * pause_, trial_ > 0 ? LONGEST_WITH_ALL : LONGEST_WITH_FEWER), now);
  }

  void wait(Clock::duration pause, Clock::time_point now) {
    pause_ = pause;
    next_trial_ = now + pause;
    tried_rows_ = rows_;
    trial_ = 0;
    new_window();
  }

  void new_window() {
    steps_ = work_ = 0;
    time_ = stalled_ = {};
  }

  const int threads_;
  int fewer_ = 0;
  int settling_ = 0;
  int steps_ = 0;  // of the window
  int rows_ = 0;   // that all of them had: a prompt among decodes is no other work
  int work_ = 0;
  Clock::duration time_{};     // that they took
  Clock::duration stalled_{};  // of it
  int trial_ = 0;              // how many threads fewer than before it
  double before_ = 0;          // the pace
  int tried_rows_ = 1;         // of the last trial
  Clock::duration pause_ = FIRST_PAUSE;
  Clock::time_point next_trial_{};
};

}  // namespace headrace::cpu
