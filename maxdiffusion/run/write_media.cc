#include "maxdiffusion/run/write_media.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/video/write_video.h"

namespace md {
namespace {

constexpr std::array<std::string_view, 4> kTypes = {"png", "mp4", "np", "latent"};

/// f32 [−1, 1] → f32 [0, 1], clipped.
HostArray unit_range(const HostArray& media) {
  HostArray out(media.shape());
  std::ranges::transform(media.view<float>(), out.mutable_view<float>().begin(),
                         [](float v) { return std::clamp(v / 2 + 0.5f, 0.0f, 1.0f); });
  return out;
}

void write_tensor(const std::string& folder, const std::string& name, const HostArray& a) {
  const std::string path = fmt::format("{}/{}.safetensors", folder, name);
  make_folders(folder);
  write_safetensors(path, {{name, a}});
  log_info("wrote {}", path);
}

}  // namespace

void check_output_type(const std::string& type) {
  check(type.empty() || std::ranges::count(kTypes, type) > 0, Code::invalid_config,
        "output_type '{}' is not one of: {}", type, fmt::join(kTypes, ", "));
}

void write_media(const std::string& prefix, const std::string& type, const HostArray& media, double fps,
                 const std::function<PngTexts(int64_t i)>& texts) {
  const bool videos = media.dims().size() == 5;
  const std::string folder = std::filesystem::path(prefix).parent_path();
  if (type == "np") return write_tensor(folder, videos ? "video" : "images", unit_range(media));
  check(videos || type != "mp4", Code::invalid_config, "output_type is mp4, but this model draws pictures; try: png");
  make_folders(folder);
  for (int64_t i = 0; i < media.dims()[0]; ++i) {
    std::string path = fmt::format("{}{}", prefix, i);
    const HostArray one = image_of_batch(media, i);
    if (!videos)
      write_png(path += ".png", one, texts ? texts(i) : PngTexts());
    else if (type == "png")
      write_frames(path, one);
    else
      write_mp4(path += ".mp4", one, {.fps = fps});
    log_info("wrote {}", path);
  }
}

HostArray still_of(const HostArray& rgb) { return rgb.dims().size() == 4 ? film_strip(rgb, 5) : rgb; }

void write_latents(const std::string& folder, const HostArray& latents) {
  write_tensor(folder, "latents", channels_first(latents));
}

}  // namespace md
