// Generated media as files.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "maxdiffusion/media/image.h"

namespace md {

/// media: f32 [N, H, W, 3] or, of videos, [N, F, H, W, 3], in [−1, 1] → files `prefix`0.png, … as `type` says: png (of
/// videos a folder of frames each), mp4 of `fps` frames per second, np (images.safetensors or video.safetensors in the
/// prefix's folder, in [0, 1]); empty: png, or mp4 of videos. `texts`, if given: what the file of image i says of it.
/// `taken`: names in the prefix's folder that are not replaced; numbers continue after theirs (image_7.png,
/// images_2.safetensors). Logs each. Throws io; invalid_config for mp4 of images.
void write_media(const std::string& prefix, const std::string& type, const HostArray& media, double fps,
                 const std::function<PngTexts(int64_t i)>& texts = {}, const std::set<std::string>& taken = {});
/// An image to show next to others: of a video (u8 [F, H, W, 3]) five of its frames side by side, of an image itself.
HostArray preview_of(const HostArray& rgb);
/// latents: f32 [N, …, C] → `folder`/latents.safetensors, channels first. `taken`: as write_media has it.
void write_latents(const std::string& folder, const HostArray& latents, const std::set<std::string>& taken = {});

}  // namespace md
