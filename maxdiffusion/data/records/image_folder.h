// An image folder: images (png, jpeg, webp, gif, bmp, tiff, avif) with captions from `metadata.jsonl` ({"file_name": …,
// "text": …}), `metadata.csv`, or a `.txt` with the name of each image; metadata wins. The layout is Hugging Face's
// "imagefolder". A clip folder is the same with clips: videos, and folders below it that hold frames (png, jpeg) and no
// videos, in the order of their names, in which numbers count by value. `name.txt` is next to the folder `name`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/storage/storage.h"

namespace md {

/// An image or a clip.
struct ImageItem {
  std::string file;  // its location
  std::string name;  // its path below the folder
  std::string caption;
  int64_t size = -1;                   // bytes, as listed; −1: not known
  std::vector<FoundFile> frames = {};  // of a clip that is a folder of frames
};
struct ImageFolderConfig {
  /// "image", and for clips "video", also mean "file_name", as in Hugging Face's loader.
  std::string image_column = "file_name", caption_column = "text";
  int64_t max_train_samples = -1;
};

/// Lists the folder (local, gs:// or s3://), recursively, sorted by path; names that start with a dot are left out.
/// Links out of the folder are not followed, and those, and files of other kinds, are counted in a warning. Each folder
/// may hold metadata for the files below it. A mark of byte order before captions is dropped, bytes that are not UTF-8
/// are U+FFFD, with a warning. Images without caption get "" and one warning counts them.
/// Throws io: folder missing (path, what to try), no images, metadata that names files outside of the folder, that do
/// not exist or twice, lacks a column or holds a line that is not JSON or has another number of cells (file:line).
std::vector<ImageItem> list_image_folder(const std::string& folder, const ImageFolderConfig& config);

}  // namespace md
