// What a run is trained on, as batches: pictures encoded beforehand or in the step, in buckets or not, DreamBooth's
// pairs, arrays that another program computed, recorded batches.
#pragma once

#include <memory>
#include <vector>

#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/tasks/latent_diffusion.h"
#include "maxdiffusion/tasks/run_config.h"
#include "maxdiffusion/train/companions.h"

namespace md {

/// Batches, and the sizes of their pictures; empty: all have the task's.
struct TrainingData {
  std::unique_ptr<Dataset> batches;
  std::vector<ImageSize> buckets = {};
};

/// What the UNet is trained on: sets the task's sizes and the arrays that are the same every step.
TrainingData training_data(const RunConfig& c, const Devices& devices, ModelFolder& folder, Companions& companions,
                           LatentDiffusion& task, HostArrays& constants);
/// The task in each size.
std::vector<LatentDiffusion> in_sizes(const LatentDiffusion& task, const std::vector<ImageSize>& buckets);
/// The first held-out records, as fields of `task`, a row each.
Batch held_out_fields(const RunConfig& c, const ModelFolder& folder, Companions& companions,
                      const LatentDiffusion& task);
/// Where the data is; makes the emoji on first use.
DataSourceConfig source_config(const DataKeys& d);
/// Refuses buckets, masks and original sizes by name: `what` brings its pictures another way.
void check_plain_pictures(const RunConfig& c, const std::string& what);
/// Samples of one update.
int64_t update_size(const RunConfig& c, const LatentDiffusion& task);

}  // namespace md
