// All kinds of training data behind one function.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/data/folders/data_folders.h"
#include "maxdiffusion/data/records/records.h"

namespace md {

/// "image_folder", "hf", …: the values of dataset_type.
std::vector<std::string> data_kinds();

struct DataSourceConfig {
  /// A member of data_kinds(); empty: recognized by the files of the location.
  std::string dataset_type;
  /// Location of the data; the first that is not empty is used. Each is a list as list_inputs() reads it. dataset_name
  /// must be a folder (storage/hub_cache.h resolves a name of the hub to one).
  std::string hf_train_files, grain_train_files, train_data_dir, hf_data_dir, dataset_name;
  std::string train_split = "train";
  /// A data set of several folders (folders/dataset_file.h), and a folder of regularization images.
  std::string dataset_config, reg_data_dir;
  /// Contents and name of dataset_config; they replace the locations above.
  std::vector<DataFolder> folders;
  std::string folders_name;
  /// Columns of tables, features of tf.Examples, keys of metadata files and of a tar's .json members.
  std::string image_column = "image", caption_column = "text";
  /// Columns of the reference images of each image, comma-separated; empty: none.
  std::string cond_image_column;
  /// If not empty, records hold these arrays instead of images. A name may have alternatives: "moments|latents" reads
  /// either, as "moments"; "timesteps|" is optional.
  std::vector<std::string> array_columns;
  /// If not empty, every image of an image folder has a mask in this folder: the image with the same relative path,
  /// with any extension.
  std::string conditioning_data_dir;
  int64_t max_train_samples = -1;                // the first N as stored; −1: all
  std::optional<int64_t> synthetic_num_samples;  // of dataset_type synthetic
  int64_t resolution = 512;                      // of dataset_type synthetic, pixels
  int64_t synthetic_frames = 0;                  // of dataset_type synthetic: clips of so many frames; 0: images
  /// If not empty, records of dataset_type synthetic hold arrays of these shapes instead of images: standard normal
  /// floats, from the seed and the record's number; zero integers. Without synthetic_num_samples they are endless.
  std::map<std::string, Shape> synthetic_arrays;
  uint64_t synthetic_seed = 0;
  bool load_tfrecord_cached = true;
  bool follow_links = false;  // of image and clip folders
  bool captions = true;       // false: captions are not used, so none is missing

  /// The entries of cond_image_column.
  std::vector<std::string> reference_columns() const;
  /// The keys of a run; captions, folders, array_columns, resolution, synthetic_frames, synthetic_arrays and
  /// synthetic_seed are the caller's.
  template <class V>
  void visit(V&& v) {
    v("dataset_type", dataset_type, "kind of the data; empty: by its files", one_of_or_empty(data_kinds()));
    v("dataset_name", dataset_name,
      "a folder or a dataset on the Hugging Face hub (owner/name); noto-emoji: images of the emoji font, generated on "
      "first use",
      KeyPath::input_or_word);
    v("train_data_dir", train_data_dir, "images with metadata.jsonl or .txt captions, or files of a kind",
      KeyPath::input);
    v("dataset_config", dataset_config,
      "dataset of several folders: a file of kohya's sd-scripts, musubi-tuner, SimpleTuner or ai-toolkit, or a folder "
      "of "
      "folders named as 10_name",
      KeyPath::input);
    v("reg_data_dir", reg_data_dir,
      "folder of folders named as 1_name with regularization images, next to such a folder in dataset_config",
      KeyPath::input);
    v("hf_train_files", hf_train_files, "Parquet or Arrow files: names with * and ?, separated by commas",
      KeyPath::input);
    v("hf_data_dir", hf_data_dir, "folder of Parquet or Arrow files", KeyPath::input);
    v("grain_train_files", grain_train_files, "ArrayRecord files", KeyPath::input);
    v("train_split", train_split, "split of a data set with several");
    v("image_column", image_column, "column of the image; in metadata.jsonl also file_name");
    v("caption_column", caption_column, "column of the caption");
    v("cond_image_column", cond_image_column,
      "column of the image that the image is made from, for models with reference images; several, separated by "
      "commas: one for each; empty: there are none");
    v("conditioning_data_dir", conditioning_data_dir,
      "folder with a mask (red, 0 to 255) for each image of train_data_dir, of the same name; with masked_loss",
      KeyPath::input);
    v("max_train_samples", max_train_samples, "use only the first N images; -1: all");
    v("follow_links", follow_links, "follow links in folders of images and clips that lead out of the folder");
    v("synthetic_num_samples", synthetic_num_samples,
      "samples of dataset_type synthetic; null: 1000 images, or endless encoded "
      "samples");
    v("load_tfrecord_cached", load_tfrecord_cached,
      "false: records of dataset_type tfrecord and grain hold images, which are encoded first");
  }
};

/// Throws invalid_config for an unknown kind (listing all) or settings that the kind does not have; io for files that
/// are missing, damaged, or lack a column (listing those found).
std::shared_ptr<const RecordSource> open_source(const DataSourceConfig& config);
/// Whether records are clips: by `folders`, `dataset_type`, or the files. Throws as open_source.
bool holds_clips(const DataSourceConfig& config);

}  // namespace md
