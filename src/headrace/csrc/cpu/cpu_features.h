// What the CPU can and the system lets it: names that headrace.native.load chooses a library by.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace headrace::cpu {

#if defined(__x86_64__)

// Asked of CPUID itself: older compilers do not know the name. The registers are those of AVX2.
inline bool has_avx_vnni() {
  unsigned eax = 0, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}

// The tile registers, which a process has to ask the system for; it then has them until its end. `bit`: of CPUID(7, 0).EDX.
inline bool has_amx(int bit) {
#if defined(__linux__)
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  unsigned eax, ebx, ecx, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & 1u << bit) && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

// The compiler's own question: it asks CPUID, and XGETBV whether the system saves the wide registers.
inline std::vector<std::string> cpu_features() {
  __builtin_cpu_init();
  std::vector<std::string> found;
  const auto add = [&](const char* name, int there) {
    if (there) found.push_back(name);
  };
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("f16c", __builtin_cpu_supports("f16c"));
  add("bmi2", __builtin_cpu_supports("bmi2"));
  add("avxvnni", __builtin_cpu_supports("avx2") && has_avx_vnni());
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512cd", __builtin_cpu_supports("avx512cd"));
  add("avx512dq", __builtin_cpu_supports("avx512dq"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
  add("amxtile", has_amx(24));
  add("amxint8", has_amx(25));
  return found;
}

#elif defined(__aarch64__) && defined(__linux__)

inline std::vector<std::string> cpu_features() {
  const unsigned long first = getauxval(AT_HWCAP);
  const unsigned long second = getauxval(AT_HWCAP2);
  std::vector<std::string> found;
  if (first & HWCAP_ASIMDHP) found.push_back("fp16");
  if (first & HWCAP_ASIMDDP) found.push_back("dotprod");
  if (second & HWCAP2_I8MM) found.push_back("i8mm");
  if (second & HWCAP2_BF16) found.push_back("bf16");
  return found;
}

#elif defined(__aarch64__) && defined(__APPLE__)

inline std::vector<std::string> cpu_features() {
  std::vector<std::string> found;
  const auto add = [&](const char* name, const char* key) {
    int there = 0;
    size_t size = sizeof(there);
    if (sysctlbyname(key, &there, &size, nullptr, 0) == 0 && there) found.push_back(name);
  };
  add("fp16", "hw.optional.arm.FEAT_FP16");
  add("dotprod", "hw.optional.arm.FEAT_DotProd");
  add("i8mm", "hw.optional.arm.FEAT_I8MM");
  add("bf16", "hw.optional.arm.FEAT_BF16");
  return found;
}

#else

inline std::vector<std::string> cpu_features() { return {}; }

#endif

}  // namespace headrace::cpu
