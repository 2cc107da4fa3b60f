// A data set of several folders with separate rules: the common result of reading any dataset file (dataset_file.h).
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/data/folders/caption_rules.h"
#include "maxdiffusion/data/records/records.h"
#include "maxdiffusion/media/image_size.h"

namespace md {

/// How a folder's images are prepared.
struct FolderImages {
  ImageSize size = {512, 512};  // of all images; with buckets their area
  bool enable_bucket = false, bucket_no_upscale = false, random_crop = false, random_flip = false;
  int64_t min_bucket_reso = 256, max_bucket_reso = 1024, bucket_reso_steps = 64;
  std::vector<int64_t> frames;  // for clips; empty: the run's
  double start = 0;             // where a clip's frames begin, from 0 (its first frame) to 1 (as late as they fit)
  bool alpha_mask = false;
  double unmasked_weight = 0;                    // lower bound of mask weights, before loss_weight
  int64_t least_area = 0, least_side = 0;        // pixels; smaller images are skipped
  double least_aspect = 0, greatest_aspect = 0;  // width / height; others are skipped. 0: no limit
};

struct DataFolder {
  std::string where;   // "dataset.toml:12", for messages
  std::string folder;  // a location; may be empty with `metadata`
  bool recursive = false, clips = false;
  bool follow_links = false;  // out of the folder
  /// Captions of the images: kohya's JSON ({"name": {"caption": …, "tags": …}}), or JSON lines ({"image_path": …,
  /// "caption": …, "control_path": …}, .jsonl). Empty: captions are next to the images.
  std::string metadata;
  std::vector<std::string> caption_extensions = {".txt"};  // the first existing one is used
  std::optional<std::string> missing_caption;              // for images without one; none: an error
  std::optional<std::string> only_caption;                 // for all images, replaces their captions
  bool names_are_captions = false;                         // "a_red-heart.png": "a red heart"
  std::string masks;                                       // folder of masks, as conditioning_data_dir; empty: none
  std::vector<std::string> references;                     // folders of reference images, in the model's order
  int64_t references_of_lines = 0;                         // reference images that each line of `metadata` names
  int64_t repeats = 1;                                     // samples per image and epoch, > 0
  int64_t most = -1;                                       // only the first ones; −1: all
  /// Images of a class: together they get as many samples per epoch as the other folders of their group.
  bool regularization = false;
  int64_t group = 0;
  double loss_weight = 1;
  CaptionRules captions;
  FolderImages images;

  /// Reference images of each image.
  int64_t reference_images() const { return std::ssize(references) + references_of_lines; }
};
/// The number of reference images that the first of these JSON lines names (DataFolder::references_of_lines):
/// "control_path", or "control_path_0", "control_path_1", …
int64_t control_images_of_lines(const std::string& file);

/// The images of several folders by number; each image once.
class DataFolders : public RecordSource {
 public:
  /// Lists all folders. Throws io for missing or empty folders, and for missing or unreadable caption and mask files,
  /// naming the folder's place in the file; invalid_config for invalid rules.
  DataFolders(std::string name, std::vector<DataFolder> folders);
  ~DataFolders() override;
  int64_t size() const override;
  bool masks() const override;
  /// Sets the folder's number, and the caption before any rule.
  Record read(int64_t index) const override;
  RecordContent content(int64_t index, FileHashes& hashes) const override;
  /// Samples per epoch. Those of regularization images follow from the other images: in order, each first gets its
  /// folder's repeats, then one more each, again and again, until there are enough. Source: kohya's sd-scripts,
  /// DreamBoothDataset.
  int64_t repeats(int64_t index) const;
  const std::string& caption(int64_t index) const;
  int64_t folder(int64_t index) const;
  const std::vector<DataFolder>& folders() const;
  /// Whether any caption depends on random bits.
  bool captions_vary() const;

 private:
  struct Item;
  struct Listed;
  DataFolders(std::string name, std::unique_ptr<const Listed> listed);
  const Item& at(int64_t index) const;
  std::unique_ptr<const Listed> listed_;
};

}  // namespace md
