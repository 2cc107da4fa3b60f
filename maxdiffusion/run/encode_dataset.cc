#include "maxdiffusion/run/encode_dataset.h"

#include <algorithm>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/array_cache.h"
#include "maxdiffusion/metrics/progress_bar.h"

namespace md {

std::string cache_key(RunModels& models) {
  const ImageKeys& images = models.config().images;
  std::string key = fmt::format("v2 resolution {} flip {}", images.resolution, images.random_flip);
  EncoderKeys types = models.config().encoders;
  types.visit([&key](const char* name, const auto& value, const char*) {
    if constexpr (std::is_same_v<decltype(value), const std::string&>)  // where weights lie changes nothing
      if (value != "float32") key += fmt::format(" {} {}", name, value);
  });
  const std::vector<std::string> denoisers = models.family()->denoisers();
  for (const auto& files : {models.folder().files(), models.folder().tokenizer_files()})
    for (const auto& [path, content] : files)
      if (std::ranges::count(denoisers, path.substr(0, path.find('/'))) == 0 && !path.starts_with("scheduler/") &&
          path != "model_index.json")
        key += "\n" + path + " " + content_hash(content);
  auto add = [&key](const std::string& name, const HostArray& a) {
    key += "\n" + name + " " + content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
  };
  for (const auto& [name, a] : models.autoencoder_values()) add(name, a);
  for (const auto& [component, weights] : models.text_encoder().weights())
    for (const auto& [name, a] : weights) add(component + "/" + name, a);
  return key;
}

HostArrays encode_dataset(RunModels& models, const LoadedImages& images, bool flip, const std::string& key) {
  const RunConfig& c = models.config();
  const int64_t n = images.pixels.dims()[0], copies = flip ? 2 : 1;
  const std::string& place = c.batches.dataset_save_location;
  const std::string folder = (place.empty() ? c.folder() : place) + "/cache";
  ArrayCache cache(folder, "pictures " + images.fingerprint + "\n" + key, n * copies, 512);
  if (!cache.complete()) log_info("caching latents and text embeddings in {}", folder);
  ProgressBar bar("cache", n * copies);
  while (auto part = cache.next_missing()) {
    std::vector<std::string> captions;
    for (int64_t i = part->begin; i < part->end; ++i) captions.push_back(images.captions[static_cast<size_t>(i % n)]);
    HostArrays arrays = models.text_encoder().encode(captions);
    arrays["moments"] = models.media_autoencoder().encode(with_mirrored(images.pixels, part->begin, part->end));
    cache.put(*part, arrays);
    bar.update(part->end, "");
  }
  bar.finish();
  return cache.read_all();
}

HostArray with_mirrored(const HostArray& pixels, int64_t from, int64_t to) {
  const Shape& s = pixels.shape();
  const int64_t n = s.dims[0];
  HostArray out = rows(pixels, 0, to - from);
  const size_t pixel = static_cast<size_t>(s.dim(-1)) * size_of(s.dtype),
               row_bytes = static_cast<size_t>(s.dim(-2)) * pixel, sample = pixels.bytes() / static_cast<size_t>(n);
  for (int64_t i = from; i < to; ++i) {
    set_rows(out, i - from, rows(pixels, i % n, 1));
    if (i < n) continue;
    std::byte* row = out.mutable_data() + static_cast<size_t>(i - from) * sample;
    for (const std::byte* end = row + sample; row < end; row += row_bytes)
      for (size_t l = 0, r = row_bytes - pixel; l < r; l += pixel, r -= pixel)
        std::swap_ranges(row + l, row + l + pixel, row + r);
  }
  return out;
}

}  // namespace md
