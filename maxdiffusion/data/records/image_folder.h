// An image folder: images (png, jpeg, webp, gif, bmp, tiff, avif) with captions from `metadata.jsonl` ({"file_name": …,
// "text": …}), `metadata.csv`, or a `.txt` with the name of each image; metadata wins. The layout is Hugging Face's
// "imagefolder". A clip folder is the same with clips: videos, or subfolders that hold frames (png, jpeg) and no
// videos. Frames are sorted by name, with numbers compared by value. The caption of a subfolder `name` is `name.txt`
// next to it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/data/records/records.h"
#include "maxdiffusion/storage/storage.h"

namespace md {

/// An image or a clip.
struct ImageItem {
  std::string file;  // its location
  std::string name;  // its path below the folder
  std::string caption;
  int64_t size = -1, modified = 0;         // bytes and time, as listed; −1: unknown
  bool captioned = false;                  // a file has the caption
  std::vector<FoundFile> frames = {};      // of a clip that is a folder of frames
  std::vector<FoundFile> references = {};  // one for each of reference_columns
  std::optional<CropBox> box = {};
};
struct ImageFolderConfig {
  /// "image", and for clips "video", also mean "file_name", as in Hugging Face's loader.
  std::string image_column = "file_name", caption_column = "text";
  int64_t max_train_samples = -1;
  std::vector<std::string> reference_columns = {};  // columns of reference images, which are items only if listed
  std::vector<std::string> caption_extensions = {
      ".txt"};  // of caption files next to the images; the first existing one is used
  bool recursive = true, clips = false;
  bool follow_links = false;  // out of the folder
  bool captions = true;       // false: captions are not used, so none is missing
  bool quiet = false;         // no warnings about images without captions, and captions without images
};

/// Lists the folder (local, gs:// or s3://), recursively, sorted by path, without names that start with a dot. Links
/// out of the folder are followed only with follow_links; a warning counts them and files of other kinds. Each folder
/// may hold metadata for the files below it. Images whose names differ only in their extension share a caption file, as
/// in kohya's sd-scripts. Images without caption get "", and one warning counts them. Throws io if the folder is
/// missing (path, what to try) or has no images, or if metadata names files that are outside of the folder, missing or
/// listed twice, lacks a column, or has a line that is not JSON or has another number of cells (file:line); and for
/// texts that decoded_text refuses.
std::vector<ImageItem> list_image_folder(const std::string& folder, const ImageFolderConfig& config);

/// The frames (png, jpeg) directly in a local folder, numbers in their names compared by value.
std::vector<FoundFile> list_frames(const std::string& folder);

/// Reads the item's record. If a file cannot be read, the record's `fault` says so.
Record read_item(const ImageItem& item, const FoundFile* mask = nullptr);
/// The item's content, of which only files that `hashes` does not know are read.
RecordContent content_of(const ImageItem& item, const FoundFile* mask, FileHashes& hashes);
/// The masks or reference images (`kind`: "mask", for messages) of the images, one each, with the same path below this
/// folder, which `key` names, and any extension. Throws io if one is missing.
std::vector<FoundFile> list_partners(const std::string& folder, const std::vector<ImageItem>& items,
                                     const std::string& key, const std::string& kind, bool follow_links);

}  // namespace md
