// LoRA files that are named in prompts, as in AUTOMATIC1111's web UI: `<lora:name:0.8>`, with the parameters of the web
// UI (te=, unet=) and of its extension sd-webui-lora-block-weight (lbw=, start=, stop=, step=).
#pragma once

#include <string>

#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/pipelines/sample_keys.h"

namespace md {

/// Removes the tags from the prompts (prompt, prompt_2, and the negative ones) and appends their files, from lora_dir,
/// to lora_files and the lists next to it, with their scales (default 1). All texts of `prompt` must have the same
/// tags. Returns whether there were any. Throws invalid_config, with the nearest names, for unknown files.
bool take_lora_tags(SampleKeys& sample, LoraKeys& lora, const std::string& lora_dir);

}  // namespace md
