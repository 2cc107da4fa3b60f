// An image folder: pictures (png, jpeg, webp) with captions from `metadata.jsonl` ({"file_name": …, "text": …}) or
// from a `.txt` beside each picture; the former wins. The layout is Hugging Face's "imagefolder".
// Formats are told by the first bytes of a file, not by its name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

struct ImageItem {
  std::string file;  // path
  std::string caption;
};
struct ImageFolderConfig {
  int64_t resolution = 512;
  bool center_crop = false, random_flip = false;
  std::string image_column = "file_name", caption_column = "text";
  int64_t max_train_samples = -1;
};

/// Lists the folder, recursively, sorted by path; names that start with a dot are left out. Each folder may hold a
/// metadata.jsonl for the files below it. Pictures without caption get "" and one warning counts them. Throws io:
/// folder missing (path, what to try), no pictures, metadata.jsonl that names files that do not exist or twice, lacks a
/// column or holds a line that is not JSON (file:line).
std::vector<ImageItem> list_image_folder(const std::string& folder, const ImageFolderConfig& config);

/// A decoded picture, RGB (alpha composed over white), u8 [H, W, 3]. Throws io naming the file and the reason.
HostArray decode_image(const std::string& file);
HostArray decode_image_bytes(const void* data, size_t size, const std::string& name);
/// u8 [R, R, 3]: bilinear resize with antialiasing, byte for byte Pillow's; with center_crop the short side becomes R,
/// then the centre is cut out, as torchvision does; otherwise both sides become R. flip: mirrored left to right.
HostArray fit_image(const HostArray& rgb, const ImageFolderConfig& config, bool flip);
/// The same as f32 in [−1, 1].
HostArray prepare_image(const HostArray& rgb, const ImageFolderConfig& config, bool flip);

struct LoadedFolder {
  HostArray pixels;  // u8 [N, R, R, 3]
  std::vector<std::string> captions, files;
  std::vector<std::string> skipped;  // "file: reason"
  std::string fingerprint;           // content key of files, captions and options
};
/// Every picture that decodes, in order, on all cores, not mirrored; each that does not is named in a warning and
/// counted. Progress is logged every few seconds. Throws io when none decodes.
LoadedFolder load_image_folder(const std::string& folder, const ImageFolderConfig& config);

}  // namespace md
