// Conversion of models between file layouts: a folder in diffusers' layout, or a single file with the original
// program's names.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// Opens a model folder, a name in the Hugging Face cache, a single file, or the newest checkpoint of a run's folder.
ModelFolder open_folder(const std::string& from, const FolderKeys& keys);
/// A component's values by published name, in their stored types. Each is read on demand. Thread safe.
ArraysToWrite stored_values(const ModelFolder& folder, const std::string& component);

/// The command's keys, after the two paths.
struct ConvertKeys {
  std::string format, dtype, component;
  bool ema = true;
  FolderKeys folder;
  /// Whether weights are quantized, as q8_0 or scaled float8.
  bool quantizes() const;
  template <class V>
  void visit(V&& v) {
    v("format", format,
      "what is written: diffusers (a folder) or single_file; empty: single_file if the name ends in .safetensors or "
      ".gguf",
      one_of_or_empty({"diffusers", "single_file"}));
    v("dtype", dtype,
      "dtype of the floats that are written: float32, bfloat16 or float16; of the matrices: q8_0 or q4_0 (.gguf), "
      "float8_e4m3fn (single .safetensors files; scaled); empty: as stored");
    v("component", component, "the one component that is read and written, such as vae; empty: all");
    v("ema", ema, "true: a checkpoint's averaged weights, if it has them; false: the trained ones");
    folder.visit(v);
  }
};

/// Reads `from` (a model folder, a name in the Hugging Face cache, a single file, a run's folder or one of its
/// checkpoints, a folder of one model) and writes `to`, which must not exist. Every tensor of `from` is written or
/// logged. `loras`: merged into the weights, with those that a checkpoint's run has trained. Throws invalid_config for
/// keys that are invalid for the model, and io for invalid files.
void convert(const std::string& from, const std::string& to, const ConvertKeys& keys,
             const std::optional<LoraKeys>& loras = {});

}  // namespace md
