#include "maxdiffusion/train/encoded.h"

#include <algorithm>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/tasks/latent_cache.h"

namespace md {
std::string cache_key(const RunConfig& c, const ModelFolder& folder, Companions& companions) {
  std::string key = fmt::format("v1 resolution {} flip {}", c.data.resolution, c.data.random_flip);
  for (const auto& [path, content] : folder.files)
    if (path.starts_with("vae/") || path.starts_with("text_encoder")) key += "\n" + path + " " + content_hash(content);
  auto add = [&key](const std::string& name, const HostArray& a) {
    key += "\n" + name + " " + content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
  };
  for (const auto& [name, a] : companions.vae()) add(name, a);
  for (const auto& [component, weights] : companions.text().weights())
    for (const auto& [name, a] : weights) add(component + "/" + name, a);
  return key;
}

static std::string cache_folder(const RunConfig& c) {
  return (c.data.dataset_save_location.empty() ? c.folder() : c.data.dataset_save_location) + "/cache";
}

HostArrays encoded(const RunConfig& c, Companions& companions, const LoadedImages& pictures, bool flip,
                   const std::string& key) {
  const int64_t n = pictures.pixels.dims()[0], copies = flip ? 2 : 1;
  const std::string folder = cache_folder(c);
  LatentCache cache(folder, "pictures " + pictures.fingerprint + "\n" + key, n * copies, 512);
  if (!cache.complete()) log_info("caching latents and text embeddings in {}", folder);
  ProgressBar bar("cache", n * copies);
  while (auto part = cache.next_missing()) {
    std::vector<std::string> captions;
    for (int64_t i = part->begin; i < part->end; ++i) captions.push_back(pictures.captions[static_cast<size_t>(i % n)]);
    TextEmbeddings e = companions.text().encode(captions);
    HostArrays arrays = {{"moments", companions.coder().encode(with_mirrored(pictures.pixels, part->begin, part->end))},
                         {"prompt_embeds", e.prompt_embeds}};
    if (e.text_embeds) arrays["text_embeds"] = e.text_embeds;
    cache.put(*part, arrays);
    bar.update(part->end, "");
  }
  bar.finish();
  return cache.read_all();
}

HostArray scaled(const HostArray& moments, const VaeConfig& vae) {
  HostArray out(moments.shape());
  const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (size_t i = 0; i < from.size(); ++i) {
    const double shift = i % (2 * c) < c ? vae.shift_factor : 0;
    to[i] = static_cast<float>((from[i] - shift) * vae.scaling_factor);
  }
  return out;
}

HostArrays cached_fields(const RunConfig& c, const ModelFolder& folder, Companions& companions,
                         const LatentDiffusion& task, const LoadedImages& pictures, const std::string& key) {
  HostArrays fields = encoded(c, companions, pictures, false, key + cache_key(c, folder, companions));
  fields["moments"] = scaled(fields.at("moments"), folder.vae);
  if (!task.from_ids) return fields;
  fields.erase("prompt_embeds");
  fields.erase("text_embeds");
  fields["ids"] = token_ids(*folder.tokenizer, pictures.captions, task.text_length);
  if (folder.tokenizer_2) fields["ids_2"] = token_ids(*folder.tokenizer_2, pictures.captions, task.text_length);
  return fields;
}

HostArray with_mirrored(const HostArray& pixels, int64_t from, int64_t to) {
  const Dims& d = pixels.dims();
  HostArray out = rows(pixels, 0, to - from);
  const size_t pixel = static_cast<size_t>(d[3]) * size_of(pixels.dtype()),
               row_bytes = static_cast<size_t>(d[2]) * pixel;
  const size_t picture = static_cast<size_t>(d[1]) * row_bytes;
  for (int64_t i = from; i < to; ++i) {
    set_rows(out, i - from, rows(pixels, i % d[0], 1));
    if (i < d[0]) continue;
    std::byte* row = out.mutable_data() + static_cast<size_t>(i - from) * picture;
    for (const std::byte* end = row + picture; row < end; row += row_bytes)
      for (size_t l = 0, r = row_bytes - pixel; l < r; l += pixel, r -= pixel)
        std::swap_ranges(row + l, row + l + pixel, row + r);
  }
  return out;
}

HostArray means(const HostArray& moments) {
  Dims dims = moments.dims();
  const int64_t c = dims.back() /= 2;
  HostArray out(Shape{DType::f32, dims});
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) to[i] = from[i / c * 2 * c + i % c];
  return out;
}

HostArray token_ids(const ClipTokenizer& tokenizer, const std::vector<std::string>& captions, int64_t length) {
  HostArray out(Shape{DType::s32, {static_cast<int64_t>(captions.size()), length}});
  auto v = out.mutable_view<int32_t>();
  int64_t cut = 0;
  for (size_t i = 0; i < captions.size(); ++i) {
    bool truncated = false;
    const std::vector<int32_t> row = tokenizer.encode(captions[i], length, &truncated);
    cut += truncated;
    std::copy(row.begin(), row.end(), v.begin() + static_cast<int64_t>(i) * length);
  }
  if (cut > 0) log_warning("{} captions are longer than {} tokens and are cut", cut, length);
  return out;
}

}  // namespace md
