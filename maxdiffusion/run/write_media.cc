#include "maxdiffusion/run/write_media.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/write_video.h"

namespace md {
namespace {

/// f32 [−1, 1] → f32 [0, 1], clipped.
HostArray unit_range(const HostArray& media) {
  HostArray out(media.shape());
  std::ranges::transform(media.view<float>(), out.mutable_view<float>().begin(),
                         [](float v) { return std::clamp(v / 2 + 0.5f, 0.0f, 1.0f); });
  return out;
}

/// One more than the largest n in names `prefix`n and `prefix`n.ending; 0 if there is none.
int64_t next_number(const std::set<std::string>& names, const std::string& prefix) {
  int64_t next = 0;
  for (const std::string& name : names) {
    if (!name.starts_with(prefix)) continue;
    const std::string rest = name.substr(prefix.size()), number = rest.substr(0, rest.find('.'));
    constexpr size_t kDigits = 15;  // fit an int64_t
    if (!number.empty() && number.size() <= kDigits && std::ranges::all_of(number, ::isdigit))
      next = std::max<int64_t>(next, std::stoll(number) + 1);
  }
  return next;
}

std::string write_tensor(const std::string& folder, const std::string& name, const HostArray& a,
                         const std::set<std::string>& existing) {
  const std::string suffix = existing.contains(name + ".safetensors")
                                 ? fmt::format("_{}", std::max<int64_t>(next_number(existing, name + "_"), 1))
                                 : "";
  std::string file = name + suffix + ".safetensors";
  const std::string path = folder + "/" + file;
  make_folders(folder);
  write_safetensors(path, {{name, a}});
  log_info("wrote {}", path);
  return file;
}

}  // namespace

void check_output_type(const std::string& type, bool videos) {
  check(videos || type != "mp4", Code::invalid_config,
        "output_type is mp4; expected png, np or latent: this model generates images");
  if (videos && (type.empty() || type == "mp4")) video_library();
}

std::set<std::string> write_media(const std::string& prefix, const std::string& type, const HostArray& media,
                                  double fps, const std::function<PngTexts(int64_t i)>& texts,
                                  const std::set<std::string>& existing) {
  const bool videos = media.dims().size() == 5;
  const std::string folder = std::filesystem::path(prefix).parent_path();
  if (type == "np") return {write_tensor(folder, videos ? "video" : "images", unit_range(media), existing)};
  check_output_type(type, videos);
  make_folders(folder);
  std::set<std::string> written;
  const int64_t first = next_number(existing, std::filesystem::path(prefix).filename());
  for (int64_t i = 0; i < media.dims()[0]; ++i) {
    std::string path = fmt::format("{}{}", prefix, first + i);
    const HostArray one = image_of_batch(media, i);
    if (!videos)
      write_png(path += ".png", one, texts ? texts(i) : PngTexts());
    else if (type == "png")
      write_frames(path, one);
    else
      write_mp4(path += ".mp4", one, {.fps = fps});
    log_info("wrote {}", path);
    written.insert(std::filesystem::path(path).filename());
  }
  return written;
}

HostArray preview_of(const HostArray& rgb) { return rgb.dims().size() == 4 ? film_strip(rgb, 5) : rgb; }

std::set<std::string> write_latents(const std::string& folder, const HostArray& latents,
                                    const std::set<std::string>& existing) {
  return {write_tensor(folder, "latents", channels_first(latents), existing)};
}

}  // namespace md
