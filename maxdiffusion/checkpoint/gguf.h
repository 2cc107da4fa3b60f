// GGUF files: a header of typed values, descriptions of tensors, and their bytes. Tensors of plain types are read as
// arrays. A quantized tensor is read as an array of bytes, with a companion array named packing_of(tensor) that holds
// its type and sizes; the weight format "GGUF" dequantizes it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/checkpoint/gguf_blocks.h"

namespace md {

struct GgufContent {
  HostArrays tensors;                           // sizes in the order of PyTorch
  std::map<std::string, std::string> metadata;  // texts and numbers; without lists
  std::map<std::string, uint64_t> offsets;      // offset of each tensor's bytes in the file
};

bool is_gguf(const MappedFile& file);
/// Reads versions 2 and 3. Checks everything against the file's size before use. Throws io, naming `name` and the
/// tensor, for truncated files, overlapping tensors, counts that the file cannot hold and types that are not supported.
GgufContent read_gguf(const std::string& name, const MappedFile& file);

/// "NAME#gguf": s64 [1 + rank], the number of the type and the sizes.
std::string packing_of(const std::string& tensor);
bool is_packing(const std::string& name);
struct GgufPacking {
  const GgufType* type = nullptr;
  Dims dims;
};
GgufPacking read_packing(const HostArray& packing);

}  // namespace md
