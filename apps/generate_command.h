// `maxdiffusion generate CONFIG key=value …`: pictures from a model folder or from a run's newest checkpoint.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/tasks/run_config.h"

namespace md {

/// `with_control`: a ControlNet must be there (generate_controlnet). Writes into output_dir.
void generate_command(const std::string& config, const std::vector<std::string>& overrides, bool with_control = false);

/// DreamBooth: draws what class_data_dir lacks of num_class_images with class_prompt, 50 steps and guidance 7.5.
void draw_class_pictures(const RunConfig& config);

}  // namespace md
