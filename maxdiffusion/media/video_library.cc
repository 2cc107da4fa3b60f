#include "maxdiffusion/media/video_library.h"

#include "maxdiffusion/base/shared_library.h"

namespace md {

const VideoLibrary& video_library() {
  static const auto& library = open_library<const VideoLibrary>("md_video.so", "md_video_library", "videos");
  return library;
}

}  // namespace md
