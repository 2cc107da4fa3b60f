// Files of tiny autoencoders, which are published without a config.json.
#pragma once

#include <string>

namespace md {

/// The text of a config.json for the tiny autoencoder in `path`, a .safetensors file or a folder with one, from the
/// names and sizes of its tensors: AutoencoderTiny (TAESD, TAEF1, TAEF2) or TAEHV (TAEW2.1, TAEW2.2). `images`: whether
/// TAEHV's media are single frames. Empty: the weights are of another model.
std::string tiny_autoencoder_config(const std::string& path, bool images);

}  // namespace md
