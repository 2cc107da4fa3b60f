// Keys of models in addition to those of the model folder.
#pragma once

#include <string>

#include "maxdiffusion/base/key_path.h"

namespace md {

/// Models in addition to those of the folder, which sampling uses.
struct AddedModelKeys {
  std::string preview_autoencoder, upscaler, refiner;
  template <class V>
  void visit(V&& v) {
    v("preview_autoencoder", preview_autoencoder,
      "tiny autoencoder that decodes the images of preview_every: a folder of AutoencoderTiny (TAESD, TAEF1), or a "
      ".safetensors file (TAEF2, TAEW); empty: their colours are a sum of the latents' channels",
      KeyPath::input);
    v("upscaler", upscaler,
      ".safetensors file of ESRGAN or Real-ESRGAN (RRDBNet) that enlarges images for upscale and hires_scale; empty: "
      "Lanczos does",
      KeyPath::input);
    v("refiner", refiner,
      "model folder that denoises the last steps, from denoising_end (0.8) on: SDXL's refiner, or another model of the "
      "same latents; empty: none",
      KeyPath::input_or_word);
  }
};

}  // namespace md
