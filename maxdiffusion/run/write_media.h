// Generated media as files.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "maxdiffusion/media/image.h"

namespace md {

/// Checks before sampling that write_media can write this type of a model's videos or images. Throws invalid_config for
/// mp4 of images; io naming the library that encodes videos if it cannot be opened.
void check_output_type(const std::string& type, bool videos);
/// Writes media, f32 [N, H, W, 3] or, for videos, [N, F, H, W, 3], in [−1, 1], to files `prefix`0.png, …. `type`: png
/// (videos: a folder of frames each), mp4 with `fps` frames per second, np (images.safetensors or video.safetensors in
/// the prefix's folder, values in [0, 1]); empty: png, or mp4 for videos. `texts`, if not empty: text chunks of image
/// i's file. `existing`: names in the prefix's folder that are not replaced; numbering continues after theirs
/// (image_7.png, images_2.safetensors). Logs each file. Returns the names. Throws io; as check_output_type.
std::set<std::string> write_media(const std::string& prefix, const std::string& type, const HostArray& media,
                                  double fps, const std::function<PngTexts(int64_t i)>& texts = {},
                                  const std::set<std::string>& existing = {});
/// A preview image: five frames of a video (u8 [F, H, W, 3]) side by side, or the image itself.
HostArray preview_of(const HostArray& rgb);
/// Writes latents, f32 [N, …, C], to `folder`/latents.safetensors, channels first. `existing` and the result: as in
/// write_media.
std::set<std::string> write_latents(const std::string& folder, const HostArray& latents,
                                    const std::set<std::string>& existing = {});

}  // namespace md
