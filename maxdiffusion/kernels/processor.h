// Processor features that the kernels use, detected at run time.
#pragma once

#include <string>

namespace md {

struct Processor {
  std::string isa;            // the instruction set of oneDNN: "avx2", "avx512_core_bf16"
  bool wide_vectors = false;  // it has AVX-512
  /// Whether bf16 products are faster in native instructions (AMX, or fast AVX-512 ones) than widened to f32.
  /// Instructions alone are not enough: with AMX disabled, AMX processors need four times as long as for f32.
  bool bf16_products = false;
  /// One line, part of the keys of cached executables.
  std::string describe() const;
};

/// Cached on the first call. Thread safe.
const Processor& processor();

}  // namespace md
