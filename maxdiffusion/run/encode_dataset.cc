#include "maxdiffusion/run/encode_dataset.h"

#include <algorithm>
#include <future>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/processes/processes.h"

namespace md {
namespace {

constexpr const char* kMirrored = "mirrored.";

/// Values that the prepared arrays depend on besides the records.
std::string options_key(const ImageConfig& c) {
  std::string key =
      fmt::format("resolution {} crop {} flip {} mask {} {} sizes {}", c.resolution, c.center_crop, c.random_flip,
                  static_cast<int>(c.mask), c.mask == MaskFrom::none ? 0 : c.mask_downscale, c.sizes);
  if (c.clip) key += fmt::format(" fps {}", c.clip->fps);
  if (c.clip && c.clip->start != 0) key += fmt::format(" start {}", c.clip->start);
  if (c.unmasked_weight != 0 || c.loss_weight != 1)
    key += fmt::format(" weights {} {}", c.unmasked_weight, c.loss_weight);
  for (const ImageConfig& folder : c.folders) key += "\n" + options_key(folder);
  return key;
}

/// Values that the encoded arrays depend on besides images and captions: weights, configs and tokenizers of the
/// encoders.
std::string models_key(ModelComponents& models) {
  std::string key = "v3";
  EncoderKeys types = models.options().keys;
  types.visit([&key](const char* name, const auto& value, const auto&...) {
    if constexpr (std::is_same_v<decltype(value), const std::string&>)  // the location of weights does not matter
      if (!value.empty() && value != "float32") key += fmt::format(" {} {}", name, value);
  });
  const std::vector<std::string> denoisers = models.family()->spec().denoisers;
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
  const Family& family = *models.family();
  for (const TextEncoderSpec& e : family.spec().text_encoders)
    for (const Placeholder& p : e.placeholders) key += fmt::format("\n{} {} {}", e.component, p.text, p.count);
  for (const MediaSize& size : family.seen({{1024, 1024}}).sizes)
    key += fmt::format("\nseen {}x{}", size.height, size.width);
  if (family.required_images() == 0) return key;
  // Models with the same autoencoder may need other conditioning images.
  const ImageConditioning& images = *family.image_conditioning();
  key += fmt::format("\nimages {}", images.min_images);
  const EncoderOptions& o = models.options();
  for (const Field& f : images.fields(training_size(o.sizes, o.resolution, family)))
    key += fmt::format(" {} {}", f.name, to_string(f.shape));
  if (const std::string& encoder = images.encoder; !encoder.empty())
    for (const auto& [name, a] : models.weights_of()(models.folder().params({encoder}), encoder)) add(name, a);
  return key;
}

/// Number of images per part: as many as fit in a fixed amount of memory; two parts are in memory at a time.
int64_t images_together(const std::vector<ImageSize>& sizes) {
  constexpr int64_t kBytes = int64_t{256} << 20, kLeast = 4, kMost = 512;
  int64_t largest = 1;
  for (const ImageSize& s : sizes) largest = std::max(largest, s.height * s.width * s.frames * 3);
  return std::clamp(kBytes / largest, kLeast, kMost);
}

std::vector<int64_t> part_of(const std::vector<int64_t>& records, const ArrayCache::Part& part) {
  return {records.begin() + part.begin, records.begin() + part.end};
}

std::string text_of(const std::vector<int64_t>& records) {
  return content_hash({reinterpret_cast<const char*>(records.data()), records.size() * sizeof(int64_t)});
}

/// The frames of each clip that the model gets as images.
std::vector<std::vector<HostArray>> known_frames(const HostArray& pixels, int64_t count) {
  std::vector<std::vector<HostArray>> out;
  for (int64_t i = 0; i < pixels.dims()[0]; ++i) {
    const HostArray clip = row_of(pixels, i);
    out.push_back({row_of(clip, 0)});
    if (count == 2) out.back().push_back(row_of(clip, clip.dims()[0] - 1));
  }
  return out;
}

class Cached final : public Examples {
 public:
  Cached(std::shared_ptr<const ArrayCache> cache, const ImageConfig& config)
      : cache_(std::move(cache)), config_(config) {}
  int64_t size() const override { return cache_->size(); }
  HostArrays read(const ExampleRef& which) const override {
    HostArrays all = cache_->read(which.index), out;
    const bool flip = random_placement(config_, which.bits).flip;
    for (auto& [name, a] : all) {
      if (name.starts_with(kMirrored)) continue;
      const auto other = all.find(kMirrored + name);
      out.emplace(name, flip && other != all.end() ? other->second : a);
    }
    return out;
  }

 private:
  std::shared_ptr<const ArrayCache> cache_;
  ImageConfig config_;
};

CachedImages cache_here(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                        const EncodeImages& encode) {
  std::vector<std::shared_ptr<ArrayCache>> caches;
  std::vector<std::pair<size_t, ArrayCache::Part>> missing;
  int64_t total = 0, done = 0;
  for (size_t b = 0; b < images.sizes.size(); ++b) {
    const auto n = static_cast<int64_t>(images.records[b].size());
    const std::string key =
        fmt::format("{}\n{}\nsize {} records {}\n{}", options_key(config), images.source->fingerprint(),
                    to_string(images.sizes[b]), text_of(images.records[b]), cache.key);
    caches.push_back(std::make_shared<ArrayCache>(cache.folder, key, n, cache.together));
    for (const ArrayCache::Part& p : caches[b]->missing()) missing.emplace_back(b, p);
    total += n, done += caches[b]->samples_present();
  }
  for (const auto& c : caches)
    for (const std::string& reason : c->left_out()) log_warning("skipped {}", reason);
  if (!missing.empty())
    log_info("caching {} in {}: {} of {} are cached already", cache.title, cache.folder, done, total);
  const auto load = [&](size_t i) {
    const auto& [b, part] = missing[i];
    return load_images(*images.source, part_of(images.records[b], part), config,
                       config.several_sizes() ? &images.sizes[b] : nullptr);
  };
  ProgressBar bar(cache.title, total, done, true);
  const Encoded encoded = [&](int64_t n) { bar.update(done + n, ""); };
  std::future<LoadedImages> next;
  for (size_t i = 0; i < missing.size(); ++i) {
    const LoadedImages loaded = next.valid() ? next.get() : load(i);
    if (i + 1 < missing.size()) next = std::async(std::launch::async, load, i + 1);
    const auto& [b, part] = missing[i];
    caches[b]->put(part, loaded.names.empty() ? HostArrays() : encode(loaded, encoded), loaded.skipped);
    bar.update(done += part.end - part.begin, "");
  }
  bar.finish();

  CachedImages out{.sizes = {}, .buckets = {}, .skipped = images.skipped};
  int64_t damaged = 0;
  std::string first;
  for (size_t b = 0; b < caches.size(); ++b) {
    const std::vector<std::string> skipped = caches[b]->left_out();
    damaged += std::ssize(skipped);
    if (first.empty() && !skipped.empty()) first = skipped[0];
    if (caches[b]->size() == 0) continue;
    out.sizes.push_back(images.sizes[b]);
    out.buckets.push_back(caches[b]);
  }
  const std::string& name = images.source->name();
  check(!out.buckets.empty(), Code::io, "{}: none of {} images can be decoded; the first: {}", name, total, first);
  out.skipped += damaged;
  if (damaged > 0) log_warning("{}: {} of {} images cannot be decoded and are skipped", name, damaged, total);
  return out;
}

}  // namespace

int64_t CachedImages::size() const {
  int64_t n = 0;
  for (const auto& b : buckets) n += b->size();
  return n;
}

CachedImages cache_images(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                          const EncodeImages& encode) {
  CachedImages out;
  processes().coordinator_first("cached " + cache.title, [&] { out = cache_here(images, config, cache, encode); });
  return out;
}

std::shared_ptr<const Examples> cached_examples(std::shared_ptr<const ArrayCache> cache, const ImageConfig& config) {
  return std::make_shared<Cached>(std::move(cache), config);
}

CachedImages encode_dataset(ModelComponents& models, const std::string& cache_dir,
                            const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                            CachedText text, const std::string* caption) {
  const ImagesInBuckets images = sort_into_aspect_buckets(source, config, true);
  const int64_t known = models.family()->required_images();
  std::optional<ImageConditioner> conditioner;
  const auto encode = [&](const LoadedImages& loaded, const Encoded& encoded) {
    if (known > 0 && !conditioner)
      conditioner.emplace(models.devices(), models.family(), models.weights_of(), models.media_autoencoder(),
                          scope_options(models.options().layers), models.options().compile, models.encoder_batch());
    std::vector<std::string> captions = loaded.captions;
    if (caption) std::ranges::fill(captions, *caption);
    HostArrays out;
    int64_t passes = 0;
    auto add = [&](const std::string& prefix, const HostArray& pixels, const HostArray& mask, const HostArray& sizes,
                   const std::vector<HostArray>& references) {
      const std::vector<std::vector<HostArray>> images = references_of(references, pixels.dims()[0]);
      const bool seen = !images.empty() && models.family()->seen(ReferenceImages::sizes_of(images[0])).tokens > 0;
      if (text != CachedText::none && (prefix.empty() || seen))
        for (const auto& [name, a] : text == CachedText::tokens
                                         ? models.family()->tokenize(captions)
                                         : models.text_encoder().encode(captions, {}, 0, 0, images))
          out[prefix + name] = a;
      for (size_t i = 0; i < references.size(); ++i)
        out[prefix + ReferenceImages::field(i)] = models.media_autoencoder().latents(references[i]);
      const int64_t before = passes++ * pixels.dims()[0], times = config.random_flip ? 2 : 1;
      out[prefix + "moments"] =
          models.media_autoencoder().encode(pixels, [&](int64_t n) { encoded((before + n) / times); });
      if (mask) out[prefix + "mask"] = mask;
      if (sizes) out[prefix + "time_ids"] = sizes;
      if (known == 0) return;
      const Dims& d = pixels.dims();
      for (const auto& [name, a] : conditioner->encode(known_frames(pixels, known), {d[2], d[3], d[1]}))
        out[prefix + name] = a;
    };
    if (!config.folders.empty()) {
      HostArray numbers(Shape{DType::s32, {std::ssize(loaded.numbers)}});
      std::ranges::copy(loaded.numbers, numbers.mutable_view<int32_t>().begin());
      out[kRecordField] = std::move(numbers);
    }
    add("", loaded.pixels, loaded.mask, loaded.time_ids, loaded.references);
    if (!config.random_flip) return out;
    std::vector<HostArray> references;
    for (const HostArray& place : loaded.references) references.push_back(mirrored(place));
    add(kMirrored, mirrored(loaded.pixels), loaded.mirrored_mask, loaded.mirrored_time_ids, references);
    return out;
  };
  std::string key = models_key(models);
  if (text == CachedText::tokens) key += "\ntokens";
  if (text == CachedText::none) key += "\nno text";
  if (caption) key += "\ncaption " + *caption;
  return cache_images(images, config, {cache_dir, key, "latents and text embeddings", images_together(images.sizes)},
                      encode);
}

std::vector<std::vector<HostArray>> references_of(const std::vector<HostArray>& places, int64_t images) {
  std::vector<std::vector<HostArray>> out(places.empty() ? 0 : static_cast<size_t>(images));
  for (size_t k = 0; k < out.size(); ++k)
    for (const HostArray& place : places) out[k].push_back(row_of(place, static_cast<int64_t>(k)));
  return out;
}

CachedImages cache_pixels(const std::string& cache_dir, const std::shared_ptr<const RecordSource>& source,
                          const ImageConfig& config) {
  const ImagesInBuckets images = sort_into_aspect_buckets(source, config, true);
  ImageConfig plain = config;
  plain.random_flip = plain.sizes = false;
  plain.mask = MaskFrom::none;
  return cache_images(images, plain, {cache_dir, "pixels", "pixels", images_together(images.sizes)},
                      [](const LoadedImages& loaded, const Encoded&) {
                        return HostArrays{{"pixels", loaded.pixels}};
                      });
}

}  // namespace md
