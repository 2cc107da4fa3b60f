// Quantized types of GGUF files: the size of a block in numbers and bytes, and its conversion to and from float.
// Source: the file format of ggml (gguf.md) and the formulas of its types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/dtype.h"

namespace md {

struct GgufType {
  uint32_t id;
  std::string_view name;                                           // "Q4_K"
  int64_t numbers = 1;                                             // numbers in a block
  int64_t bytes = 0;                                               // bytes of a block
  void (*read)(const std::byte* block, float* numbers) = nullptr;  // null: a plain type, or one that is not supported
  void (*write)(const float* numbers, std::byte* block) = nullptr;
  bool plain = false;
  DType dtype = DType::f32;  // if `plain`
};

/// The type with this number; null if there is none.
const GgufType* find_gguf_type(uint32_t id);
/// The GGUF type of an element type; null if GGUF has none.
const GgufType* gguf_type_of(DType type);
/// The type with this lower-case name, if it can be written; else null.
const GgufType* find_written_gguf_type(std::string_view name);
/// Names of the types that can be read, for messages.
std::vector<std::string_view> gguf_type_names();

/// Dequantizes `blocks` blocks on all cores.
void read_gguf_blocks(const GgufType& type, const std::byte* from, int64_t blocks, float* to);
void write_gguf_blocks(const GgufType& type, const float* from, int64_t blocks, std::byte* to);

}  // namespace md
