// Internal to ops/: shared by the generators on the device and on the host. Source: Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3" (Threefry-2x32, 20 rounds).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace md {

using ThreefryWords = std::array<uint32_t, 2>;

// Rotations, four per group of rounds, and the constant of the key schedule.
constexpr int kThreefryRotation[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
constexpr uint32_t kThreefryParity = 0x1BD11BDA;

// The high word of a counter separates uses, so that sampling from a key and deriving keys from it are independent:
// element i of an array has the counter (0, i); with more than 2^32 elements, element i of row r has (r, i).
enum Use : uint32_t { kSample = 0, kStep = 0x80000001, kPurpose = 0x80000002, kFold = 0x80000003 };

constexpr double kUnit = 1.0 / (1 << 24);  // numbers in [0, 1) are multiples of this, exact in f32

constexpr ThreefryWords seed_key(uint64_t seed) {
  return {static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(seed)};
}

/// FNV-1a. Source: the FNV hash, offset basis and prime of 32 bits.
constexpr uint32_t purpose_word(std::string_view text) {
  uint32_t h = 2166136261u;
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 16777619u;
  return h;
}

}  // namespace md
