// Counted randomness: the bits of headrace.sampling.philox (Philox4x32-10; Salmon et al., SC 2011).
#pragma once

#include <cstdint>

namespace headrace::cpu {

// In (0, 1): an odd multiple of 2^-24. Of the draw that picks a token (purpose 0).
inline float uniform(int64_t seed, int64_t output_index, int32_t sample_index) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)};
  uint32_t word[4] = {static_cast<uint32_t>(output_index), static_cast<uint32_t>(static_cast<uint64_t>(output_index) >> 32), 0,
                      static_cast<uint32_t>(sample_index)};
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t{0xD2511F53} * word[0], second = uint64_t{0xCD9E8D57} * word[2];
    const uint32_t even = static_cast<uint32_t>(second >> 32) ^ word[1] ^ key[0];
    const uint32_t odd = static_cast<uint32_t>(first >> 32) ^ word[3] ^ key[1];
    word[1] = static_cast<uint32_t>(second);
    word[3] = static_cast<uint32_t>(first);
    word[0] = even;
    word[2] = odd;
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<float>((word[0] >> 9) * 2 + 1) * (1.0f / (1 << 24));
}

}  // namespace headrace::cpu
