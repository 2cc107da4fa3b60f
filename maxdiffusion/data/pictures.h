// Pictures of records, made ready for training: decoded, resized, cropped, mirrored; all at once or batch by batch.
// Formats (PNG, JPEG, WebP) are told by the first bytes, not by a name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/records.h"

namespace md {

struct PictureConfig {
  int64_t resolution = 512;
  bool center_crop = false, random_crop = false, random_flip = false;
};

/// A decoded picture, RGB (alpha composed over white), u8 [H, W, 3]. Throws io naming the file and the reason. With
/// `side` a JPEG whose sides are all at least four times that comes smaller, by 2, 4 or 8, but at least twice `side`.
HostArray decode_image(const std::string& file);
HostArray decode_image_bytes(const void* data, size_t size, const std::string& name, int64_t side = 0);

/// What is drawn for one picture: mirrored left to right; where a crop lies between the first place (0) and the last
/// (1).
struct Placement {
  bool flip = false;
  double y = 0.5, x = 0.5;
};
/// u8 [R, R, 3]: bilinear resize with antialiasing, byte for byte Pillow's; with center_crop or random_crop the short
/// side becomes R, then a square is cut out, as torchvision does; otherwise both sides become R.
HostArray fit_image(const HostArray& rgb, const PictureConfig& config, const Placement& placement = {});
/// From the random bits of a record, for the options that draw.
Placement draw_placement(const PictureConfig& config, uint64_t bits);

struct LoadedPictures {
  HostArray pixels;  // u8 [N, R, R, 3]
  std::vector<std::string> captions, names;
  std::vector<std::string> skipped;  // "file: reason"
  std::string fingerprint;           // content key of pictures, captions and options; of a part: what goes into it
};
/// Every picture that decodes, in stored order, on all cores, not mirrored; each that does not is named in a warning
/// and counted. Progress is logged every few seconds. Throws io when none decodes, invalid_config for random_crop:
/// crops that change need picture_batches.
LoadedPictures load_pictures(std::shared_ptr<const RecordSource> source, const PictureConfig& config);

struct BatchConfig {
  StreamConfig stream;
  int64_t batch = 1;
  int workers = 0;  // threads that read and decode; 0: the cores
};
/// What captions become, a row each: token ids, say. Called on the thread that calls next().
using EncodeCaptions = std::function<Batch(const std::vector<std::string>&)>;

/// The same, `together` at a time at most, each part given to `take`, so that a data set need not fit into memory;
/// returns what was skipped.
std::vector<std::string> each_part(std::shared_ptr<const RecordSource> source, const PictureConfig& config,
                                   int64_t together, const std::function<void(LoadedPictures&& part)>& take);

/// Batches as they come from a source: `pixels` u8 [B, R, R, 3] and what `captions` makes. Pictures that do not decode
/// are named in a warning, once each, and the next record takes their place; an epoch without one that does is io.
std::unique_ptr<Dataset> picture_batches(std::shared_ptr<const RecordSource> source, const PictureConfig& pictures,
                                         const BatchConfig& config, EncodeCaptions captions);
/// The arrays of records, stacked. Throws io naming the record whose arrays have other names, types or sizes than those
/// before.
std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config);

}  // namespace md
