// `maxdiffusion generate CONFIG key=value …`: pictures from a model folder or from a run's newest checkpoint.
#pragma once

#include <string>
#include <vector>

namespace md {

/// `with_control`: a ControlNet must be there (generate_controlnet). Writes into output_dir.
void generate_command(const std::string& config, const std::vector<std::string>& overrides, bool with_control = false);

}  // namespace md
