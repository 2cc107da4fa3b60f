// The stage before the denoiser's with train_new_vae: trains a randomly initialized autoencoder on the run's images.
#pragma once

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/run/model_components.h"
#include "maxdiffusion/run/train_plan.h"

namespace md {

/// Trains the autoencoder of `models` by plan.autoencoder, on samples with the field pixels. Writes the stage's files
/// to vae/ in the run's folder, and an image of originals above their reconstructions to samples/.
void train_autoencoder(ModelComponents& models, const TrainPlan& plan, const std::shared_ptr<const Examples>& images);

}  // namespace md
