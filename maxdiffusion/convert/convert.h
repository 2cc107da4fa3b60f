// Models between layouts of files: a folder as diffusers has it, or a single file under the original program's names.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// A model folder, a name in the Hugging Face cache, a single file, or a run's folder: its newest
/// checkpoint.
ModelFolder open_folder(const std::string& from, const FolderKeys& keys);
/// A component's values by published name, in the types in which they are stored. Each is read on demand;
/// several threads may ask.
ArraysToWrite stored_values(const ModelFolder& folder, const std::string& component);

/// The command's keys, after the two paths.
struct ConvertKeys {
  std::string format, dtype, component;
  bool ema = true;
  FolderKeys folder;
  template <class V>
  void visit(V&& v) {
    v("format", format,
      "what is written: diffusers (a folder) or single_file; empty: single_file if the name ends in .safetensors",
      one_of_or_empty({"diffusers", "single_file"}));
    v("dtype", dtype, "dtype of the floats that are written: float32, bfloat16 or float16; empty: as stored");
    v("component", component, "the one component that is read and written, such as vae; empty: all");
    v("ema", ema, "true: a checkpoint's averaged weights, if it has them; false: the trained ones");
    folder.visit(v);
  }
};

/// Reads `from` (a model folder, a name in the Hugging Face cache, a single file, a run's folder or one of its
/// checkpoints, a folder of one model) and writes `to`, which must not be there. Every tensor of `from` is written or
/// named. Throws invalid_config for keys that do not fit; io for files that do not. `loras`: added to the weights, with
/// those that a checkpoint's run has trained.
void convert(const std::string& from, const std::string& to, const ConvertKeys& keys,
             const std::optional<LoraKeys>& loras = {});

}  // namespace md
