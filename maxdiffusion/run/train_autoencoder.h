// The stage before the denoiser's with train_new_vae: an autoencoder of random weights, trained on the run's images.
#pragma once

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/run/run_models.h"

namespace md {

/// Options of a loop that are common to all stages of a run; outputs go to `stage` in the run's
/// folder, or where it is empty to that.
LoopOptions loop_options(const RunModels& models, const std::string& stage, const std::string& title);
/// Trains the autoencoder of `models` on samples with the field pixels. The stage's files go to vae/ in the run's
/// folder, and an image of originals above their reconstructions to samples/.
void train_autoencoder(RunModels& models, const std::shared_ptr<const Samples>& images);

}  // namespace md
