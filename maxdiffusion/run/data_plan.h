// Source and preparation of a run's samples, decided before any is read.
#pragma once

#include <optional>
#include <string>

#include "maxdiffusion/data/demo/moving_emoji.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/run/cache_use.h"
#include "maxdiffusion/settings/data_mode.h"
#include "maxdiffusion/settings/run_info.h"
#include "maxdiffusion/tasks/denoise.h"

namespace md {

/// A source of records, and what must be done before it can be opened.
struct SourcePlan {
  DataSourceConfig config;                 // dataset_name may be a name of the hub
  std::optional<MovingEmojiConfig> emoji;  // if set, emoji are rendered into the folder dataset_name
  bool emoji_move = false;                 // render clips, not images
  std::vector<int64_t> batch_sizes = {};   // set in a dataset file
};
/// Defaults from the keys for folders whose file does not set them.
FolderImages usual_folder(const ImageKeys& keys);
/// Reads dataset_config. Throws invalid_config; io if it cannot be read.
SourcePlan plan_source(const DataKeys& keys, DataMode mode);
/// Renders missing emoji; resolves names of the hub to cached folders. Called by all processes. Throws io.
DataSourceConfig prepare_source(const SourcePlan& plan);

struct DreamboothPlan {
  std::string class_data_dir, instance_prompt, class_prompt;
};

struct DataPlan {
  DataMode mode = DataMode::cached_latents;
  SourcePlan source;   // DreamBooth: that of the subject; recorded batches: unused
  ImageConfig images;  // for modes that read images
  std::string replay;  // file of recorded batches
  std::optional<DreamboothPlan> dreambooth;
  CachePlace cache;  // of encoded samples
  bool shuffle = true;
  int workers = 0;  // threads that read and decode; 0: one for each core

  /// Whether records are stored images with captions.
  bool reads_images() const {
    return (mode == DataMode::images || mode == DataMode::cached_latents || mode == DataMode::dreambooth) &&
           source.config.dataset_type != "synthetic";
  }
};
/// Pure. Throws invalid_config, for example for sizes that the family's models do not support.
DataPlan plan_data(const DataKeys& keys, DataMode mode, const RunInfo& run, const Family& family);
/// How images or clips are prepared. Throws as plan_data.
ImageConfig plan_images(const DataKeys& keys, const Family& family);
/// The config of each folder's images; `images` has the config that all share. `family`: null if no model is known;
/// then no size is rejected. Throws as plan_data.
ImageConfig plan_folders(ImageConfig images, const std::vector<DataFolder>& folders, const DataKeys& keys,
                         const Family* family);
/// Plans random latents and embeddings: their shapes in `source`, and the inputs of `task`. Throws as plan_data.
void plan_synthetic(const DataKeys& keys, const RunInfo& run, DenoiseTask& task, DataSourceConfig& source);

/// Throws invalid_config in all processes if one of them finds other data: another number of records, or other contents
/// of some of them. Collective.
void check_same_data(const DataPlan& plan);

}  // namespace md
