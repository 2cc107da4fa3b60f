// Seeded orders. Saved positions depend on them: they must never change.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace md {

/// A bijective mix of 64 bits, so a counter gives a stream. Source: Steele, Lea, Flood, "Fast splittable pseudorandom
/// number generators", OOPSLA 2014 (splitmix64).
constexpr uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

/// [0, size) in the order of one epoch: Fisher–Yates, each swap from its own counter.
inline std::vector<int64_t> order_of(int64_t size, uint64_t seed, int64_t epoch, bool shuffle) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  if (!shuffle) return order;
  const uint64_t key = mix(mix(seed) ^ static_cast<uint64_t>(epoch));
  for (uint64_t i = order.size(); i > 1; --i) {
    // The high half of a 128-bit product maps 64 random bits to [0, i) with a bias below i / 2^64.
    const auto j = static_cast<uint64_t>(static_cast<unsigned __int128>(mix(key ^ i)) * i >> 64);
    std::swap(order[i - 1], order[j]);
  }
  return order;
}

/// Random bits of the sample at one place of an epoch's order.
constexpr uint64_t bits_of_sample(uint64_t seed, int64_t epoch, int64_t index) {
  return mix(mix(mix(~seed) ^ static_cast<uint64_t>(epoch)) ^ static_cast<uint64_t>(index));
}

}  // namespace md
