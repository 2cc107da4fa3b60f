// `maxdiffusion train CONFIG key=value …`: training with pictures drawn by the sampling pipeline.
#pragma once

#include <string>
#include <vector>

namespace md {

void train_command(const std::string& config, const std::vector<std::string>& overrides);

}  // namespace md
