// What the kernels gain from on the processor that they run on. It is asked, never recognised by its name.
#pragma once

#include <string>

namespace md {

struct Processor {
  std::string isa;            // the instruction set that oneDNN uses, by its own word: "avx2", "avx512_core_bf16"
  bool wide_vectors = false;  // that is some AVX-512
  /// Whether products of bf16 are faster in the processor's own instructions than widened to f32: it has tiles for them
  /// (AMX), or instructions that are. That it has instructions is not enough: where tiles are switched off, processors
  /// that were made with them take four times as long for one as for a product of f32.
  bool bf16_products = false;
  /// One line, part of the names of cached executables.
  std::string describe() const;
};

/// Of this process; found out on the first call. Thread safe.
const Processor& processor();

}  // namespace md
