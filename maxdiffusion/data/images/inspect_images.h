// Information about a data set's images before training: which are damaged, small, rotated or duplicates, their sizes
// in training, and what the model sees.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/data/images/prepare.h"

namespace md {

struct ImageFindings {
  std::string name, fault;         // fault: decoding error; empty: none
  ImageSize size;                  // stored size, upright
  double enlarged = 1;             // enlargement factor in training; at most 1: none
  bool turned = false;             // the stored image is rotated or mirrored
  uint64_t gradients = 0;          // of 9×8 grey pixels: each one brighter than its left neighbour?
  std::array<uint8_t, 192> small;  // 8×8 pixels
};
/// Decodes the whole image; for a clip its first frame.
ImageFindings inspect_image(const Record& record, const ImageConfig& config);
/// Pairs of images that look the same: at most 3 of 64 gradients differ (the "difference hash"), and the 8×8 pixels by
/// at most 2 of 255 on average. The second image of a pair is in no other pair.
std::vector<std::pair<size_t, size_t>> duplicate_images(const std::vector<ImageFindings>& all);

/// A bar chart of the samples per bucket, labelled with bucket sizes: u8 [H, W, 3].
HostArray bucket_chart(const std::vector<ImageSize>& sizes, const std::vector<int64_t>& samples);
/// The image that the model sees for a record and these random bits (for a clip its first frame), fitted into a square
/// of `side` pixels; red where a mask reduces the weight.
HostArray seen_by_model(const Record& record, const ImageConfig& config, uint64_t bits, int64_t side);

}  // namespace md
