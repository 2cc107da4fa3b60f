// Random numbers from a counter: Threefry-2x32 with 20 rounds over an iota, in plain integer operations, so that the
// same key yields the same bits on every device and under every sharding. Source: Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

/// The block cipher itself, on the host: two words from a key and a counter.
std::array<uint32_t, 2> threefry(std::array<uint32_t, 2> key, std::array<uint32_t, 2> counter);

/// The key of a seed that is an input of the program: u32[2], low word first. Its numbers differ from those of
/// Rng::seed and HostRng, which put the high word first.
HostArray key_of_seed(uint64_t seed);

/// A key is u32[2]. A value without state: derive a new one for every use.
class Rng {
 public:
  explicit Rng(Tensor key, Tensor rows = {}) : key_(key), rows_(rows) {}
  /// From a seed that is constant in the graph.
  static Rng seed(Graph& g, uint64_t seed);
  /// Key of step `step` (scalar integer tensor), of purpose `purpose` (hashed by name), of the i-th use.
  Rng at_step(Tensor step) const;
  Rng for_(std::string_view purpose) const;
  Rng fold(uint32_t i) const;
  /// For arrays whose axis 0 is the batch: row numbers, s32 or u32 [B], instead of 0 … B − 1. A sample then gets the
  /// same numbers at any position of a batch.
  Rng with_rows(Tensor numbers) const { return Rng(key_, numbers); }
  Tensor key() const { return key_; }
  Tensor rows() const { return rows_; }

 private:
  Tensor key_, rows_;
};

Tensor random_bits(Rng rng, Dims dims);                                               // u32
Tensor random_uniform(Rng rng, const Shape& shape, double low = 0, double high = 1);  // [low, high)
Tensor random_normal(Rng rng, const Shape& shape);                                    // mean 0, variance 1; f32 inside
Tensor random_integers(Rng rng, Dims dims, int64_t low, int64_t high);                // s32 in [low, high)

/// The generator on the host, for initialisers and shuffles: bits(i) is element i, row-major, of
/// random_bits(Rng::seed(g, seed).for_(purpose), …), and uniform(i) that of random_uniform; a filled normal agrees with
/// random_normal up to rounding.
class HostRng {
 public:
  HostRng(uint64_t seed, std::string_view purpose);
  uint32_t bits(uint64_t index) const;
  double uniform(uint64_t index) const;  // [0, 1)
  enum class Distribution { normal, truncated_normal, symmetric_uniform };
  /// Elements `from` … of a unit normal, of one truncated at ±2 (not rescaled), or uniform in [−1, 1), times `scale`.
  /// Bit-identical on every processor.
  void fill(Distribution d, double scale, uint64_t from, std::span<float> out) const;
  uint64_t below(uint64_t index, uint64_t bound) const;  // in [0, bound), bound ≤ 2^32

 private:
  std::array<uint32_t, 2> key_;
};

}  // namespace md
