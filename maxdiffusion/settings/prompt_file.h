// Files with one prompt per line, in the format of AUTOMATIC1111's script "prompts from file".
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// The configs of the non-blank lines of config.prompt_file, in order, with the location `where` ("FILE:3") of each. A
/// line is a prompt; a line that begins with -- has options with values, quoted as in a shell: those of the script
/// (prompt and negative_prompt also without quotes, negative_prompt, width, height, seed, steps, cfg_scale,
/// sampler_name, batch_size, n_iter) and the keys of SampleKeys and SchedulerKeys. Defaults are the config's, and 1 for
/// num_images_per_prompt. Throws io; invalid_config, naming file and line, for a file without lines, unknown options
/// (with the nearest name), options that repeat or lack a value, and invalid values.
struct PromptLine {
  RunConfig config;
  std::string where;
};
/// The key for an option of the script (steps: num_inference_steps); the option itself if it is a key.
std::string key_of_option(const std::string& option);
std::vector<PromptLine> prompt_lines(const RunConfig& config);

}  // namespace md
