// Steps of two threads that share one core: prints the microseconds of CPU time that a phase without work takes.
#include <sched.h>

#include <cstdio>
#include <ctime>

#include "pool.h"

using headrace::cpu::Pool;
using headrace::cpu::Worker;

int main() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) return 1;
  constexpr int STEPS = 10, PHASES = 100;
  Pool pool(2);
  int done = 0;
  auto step = [&](Worker& worker) {
    for (int phase = 0; phase < PHASES; phase++) {
      worker.share(1, 1, [&](int, int) { done++; });
    }
  };
  timespec begin, end;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
  for (int i = 0; i < STEPS; i++) pool.run(0, step);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  if (done != STEPS * PHASES) return 2;
  std::printf("%.1f\n", ((end.tv_sec - begin.tv_sec) * 1e6 + (end.tv_nsec - begin.tv_nsec) * 1e-3) / done);
}
