// Timesteps of models distilled to a few steps (LCM, TCD).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <vector>

namespace md {

/// `steps` evenly spaced timesteps, descending from the last one, out of those of distillation:
/// `original_inference_steps` of them, one every T div that many. Throws invalid_config if `steps` is larger than their
/// number.
std::vector<double> distilled_timesteps(const nlohmann::json& config, int64_t steps);

}  // namespace md
