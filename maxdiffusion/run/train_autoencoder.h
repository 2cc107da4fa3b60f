// The stage before the denoiser's with train_new_vae: an autoencoder of random weights, trained on the run's images.
#pragma once

#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/run/run_models.h"

namespace md {

/// What the keys say of every stage of a run; outputs go to `folder`.
LoopOptions loop_options(const RunConfig& c, const std::string& folder, const std::string& title);
/// Sets the autoencoder of `models`. The stage's files go to vae/ of the run's folder, and a picture of originals above
/// their reconstructions to its samples/.
void train_autoencoder(RunModels& models, const LoadedImages& images);

}  // namespace md
