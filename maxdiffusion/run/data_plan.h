// Where a run's samples come from and how they are prepared, before any of them is read.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/data/demo/moving_emoji.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/settings/data_mode.h"
#include "maxdiffusion/settings/run_info.h"
#include "maxdiffusion/tasks/denoise.h"

namespace md {

/// A source of records, and how it comes to be there.
struct SourcePlan {
  DataSourceConfig config;                 // its dataset_name may be a name of the hub
  std::optional<MovingEmojiConfig> emoji;  // are made in the folder dataset_name
  bool emoji_move = false;                 // clips, not images
};
/// Throws invalid_config.
SourcePlan plan_source(const DataKeys& keys, DataMode mode);
/// Makes the emoji that are not there yet; finds names of the hub in its cache. Called by all processes. Throws io.
DataSourceConfig prepare_source(const SourcePlan& plan);

struct DreamboothPlan {
  std::string class_data_dir, instance_prompt, class_prompt;
};

struct DataPlan {
  DataMode mode = DataMode::cached_latents;
  SourcePlan source;   // of DreamBooth that of the subject; of recorded batches none
  ImageConfig images;  // of modes that read images
  std::string replay;  // file of recorded batches
  std::optional<DreamboothPlan> dreambooth;
  std::string cache_dir;  // of what is encoded once; may be in a bucket
  bool shuffle = true;
  int workers = 0;  // threads that read and decode; 0: the cores

  /// Whether records are images with captions that are stored somewhere.
  bool reads_images() const {
    return (mode == DataMode::images || mode == DataMode::cached_latents || mode == DataMode::dreambooth) &&
           source.config.dataset_type != "synthetic";
  }
};
/// Pure. Throws invalid_config, as for sizes that the family's models cannot take.
DataPlan plan_data(const DataKeys& keys, DataMode mode, const RunInfo& run, const Family& family);
/// How images or clips are prepared. Throws likewise.
ImageConfig plan_images(const DataKeys& keys, const Family& family);
/// Of random latents and embeddings: their shapes in `source`, and what `task` reads. Throws likewise.
void plan_synthetic(const DataKeys& keys, const RunInfo& run, DenoiseTask& task, DataSourceConfig& source);

}  // namespace md
