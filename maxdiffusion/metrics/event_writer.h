// TensorBoard event files: scalars, texts, images and videos of a run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// One TensorBoard event file, events.out.tfevents.TIME.HOST.PROCESS.COUNT. Thread safe. Writes are buffered
/// until flush(), destruction, a few seconds or many bytes.
class EventWriter {
 public:
  /// The file begins with the text `maxdiffusion_version`. `resumed_from` > 0: TensorBoard discards later steps of
  /// earlier files in the folder.
  explicit EventWriter(const std::string& folder, int64_t resumed_from = 0);
  ~EventWriter();
  void scalar(const std::string& tag, double value, int64_t step);
  /// Markdown.
  void text(const std::string& tag, const std::string& value, int64_t step = 0);
  /// rgb: u8 [H, W, 3].
  void image(const std::string& tag, const HostArray& rgb, int64_t step);
  /// frames: u8 [F, H, W, 3]. An animated GIF among the images, as tensorboardX writes videos.
  void video(const std::string& tag, const HostArray& frames, double fps, int64_t step);
  void flush();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
