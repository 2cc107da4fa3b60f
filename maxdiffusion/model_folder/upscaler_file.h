// Files of upscalers: a network that enlarges images, without a config.json.
#pragma once

#include <string>

namespace md {

/// The text of a config.json for a .safetensors file of an RRDBNet (models/rrdb_net.h) with the names of Real-ESRGAN,
/// ESRGAN or BSRGAN, from the sizes of its tensors. Throws invalid_config for another file.
std::string upscaler_config(const std::string& file);

}  // namespace md
