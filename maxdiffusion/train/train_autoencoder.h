// The stage before the UNet's with train_new_vae: an autoencoder of random weights, trained on the run's pictures.
#pragma once

#include <string>

#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/tasks/encode.h"
#include "maxdiffusion/tasks/run_config.h"
#include "maxdiffusion/train/loop.h"

namespace md {

/// Its values by input name; the stage's files go to vae/ of the run's folder.
HostArrays train_autoencoder(const RunConfig& c, const Devices& devices, const ModelFolder& folder,
                             const LoadedImages& pictures);
/// Mean and spread of latents over pictures: LDM's scaling_factor is one over their standard deviation.
double latent_scale(const HostArray& moments);
/// Writes a picture: originals above their reconstructions.
void write_reconstructions(PictureCoder& coder, const HostArray& pixels, const std::string& path);

}  // namespace md
