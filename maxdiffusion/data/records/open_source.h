// Every kind of training data behind one function.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/records/records.h"

namespace md {

struct DataSourceConfig {
  /// A member of data_kinds(); empty: told from the files of the location.
  std::string dataset_type;
  /// Where the data is, by kind; the first that is not empty counts. Each is a list as list_inputs() reads it. A
  /// dataset_name must be a folder: nothing is fetched from a hub.
  std::string hf_train_files, grain_train_files, train_data_dir, hf_data_dir, dataset_name;
  std::string train_split = "train";
  /// Columns of tables, features of tf.Examples, keys of metadata files and of a tar's .json members.
  std::string image_column = "image", caption_column = "text";
  /// If not empty, records are these arrays instead of pictures: names, each with alternatives: "moments|latents" reads
  /// either as "moments".
  std::vector<std::string> array_columns;
  /// If not empty, every picture of an image folder has a mask here: the picture of the same path below its folder,
  /// whatever the extension.
  std::string mask_folder;
  int64_t max_train_samples = -1;                          // the first N as stored; −1: all
  int64_t synthetic_num_samples = 1000, resolution = 512;  // of dataset_type synthetic
};

/// What the two data sets of the reference hold when latents and text embeddings were computed beforehand. Source: its
/// feature descriptions (TFRecord features of SDXL; of LAION for Stable Diffusion 2, and what its creator writes).
std::vector<std::string> sdxl_cached_columns();
std::vector<std::string> laion_cached_columns();

/// Throws invalid_config for a kind that is none (listing all) or settings that a kind does not have, io for what is
/// wrong with the files: missing, damaged, without a column (listing those found).
std::shared_ptr<const RecordSource> open_source(const DataSourceConfig& config);
/// "image_folder", "hf", …
std::vector<std::string> data_kinds();

}  // namespace md
