// What each value of the key timestep_sampling reads.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// Whether the distribution `sampling` reads `key`, one of logit_mean, logit_std, mode_scale, sigmoid_scale and
/// train_flow_shift. An unknown distribution reads none.
bool timestep_sampling_reads(const std::string& sampling, std::string_view key);

}  // namespace md
