// Writes quantized weights: GGUF, and scaled float8 in safetensors as ComfyUI defines it. Tensors are quantized one at
// a time, while they are written.
#pragma once

#include <string>

#include "maxdiffusion/checkpoint/gguf_blocks.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {

/// Writes GGUF version 3. `type` applies to matrices whose rows are whole blocks. Other tensors with more than one axis
/// and more than 1,024 numbers become F16, the rest F32. Null `type`: tensors keep their types. Tensors may have five
/// axes, as published files of video models do. Throws io.
void write_gguf(const std::string& path, const ArraysToWrite& tensors, const GgufType* type,
                const std::string& architecture);

/// Matrices "….weight", except embeddings, become float8_e4m3fn, each with a scale "….scale_weight"; `prefix` +
/// "scaled_fp8" marks the file. Other tensors are unchanged. Source: ComfyUI, comfy/ops.py.
ArraysToWrite with_scaled_float8(const ArraysToWrite& tensors, const std::string& prefix);

}  // namespace md
