// Which numbers of threads a made-up machine runs its steps with: `thread_choice SCENE` prints them as one line of digits.
//
// A step of r rows takes 0.8 (r + 4) ms on one thread and half of that on two. `quiet`: nobody else wants a core, or once in a
// while. `stranger`: another process wants one all the time; a step of two threads then mostly loses 4 ms, which is more than the
// second thread wins, and so do those of one thread until the stranger has been moved. `leaves`: he is there for the first 300
// steps only. `server`: each step of two threads loses 1.2 ms to one who uses a core for a moment, less than the thread wins.
// `streams`: it loses 2.5 ms, more than the thread wins of one row and less than of eight, which there are from step 1000 on.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "thread_choice.h"

using headrace::cpu::ThreadChoice;
using Clock = ThreadChoice::Clock;

int main(int, char** arguments) {
  const char* scene = arguments[1];
  const auto is = [&](const char* name) { return std::strcmp(scene, name) == 0; };
  uint64_t state = 1;
  const auto chance = [&] { return ((state = state * 6364136223846793005 + 1442695040888963407) >> 11) / 9007199254740992.0; };
  const auto duration = [](double ms) { return std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6)); };
  ThreadChoice choice(2);
  Clock::time_point now{};
  for (int step = 0, alone = 0; step < 2000; step++) {
    const int threads = choice.threads();
    alone = threads == 1 ? alone + 1 : 0;
    std::printf("%d", threads);
    const bool stranger = is("stranger") || (is("leaves") && step < 300);
    const int rows = is("server") ? 4 + step / 100 % 5 : is("streams") && step >= 1000 ? 8 : 1;
    double stalled = 0;
    if (stranger && (threads == 2 ? chance() < 0.8 : alone < 4)) stalled = 4;
    if (threads == 2 && is("server")) stalled = 1.2;
    if (threads == 2 && is("streams")) stalled = 2.5;
    if (threads == 2 && is("quiet") && step % 100 == 7) stalled = 8;
    const double took = (rows + 4) / 5.0 * 4 / threads * (0.97 + 0.06 * chance()) + stalled;
    now += duration(took + 0.2);
    choice.learn(rows, duration(took), duration(stalled), now);
  }
  std::printf("\n");
}
