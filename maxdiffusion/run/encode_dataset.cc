#include "maxdiffusion/run/encode_dataset.h"

#include <algorithm>
#include <future>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/data/records/file_hashes.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/processes/processes.h"

namespace md {
namespace {

constexpr const char* kMirrored = "mirrored.";

/// Values that a prepared image depends on in addition to its record.
std::string options_key(const ImageConfig& c) {
  std::string key = fmt::format("resolution {} crop {} flip {} mask {} {} sizes {} references {}", c.resolution,
                                c.center_crop, c.random_flip, static_cast<int>(c.mask),
                                c.mask == MaskFrom::none ? 0 : c.mask_downscale, c.sizes, c.references);
  if (c.buckets) key += " buckets";
  if (c.buckets && c.buckets->config().bucket_no_upscale)
    key += fmt::format(" of {} pixels in steps of {}", c.buckets->config().most_pixels(),
                       c.buckets->config().bucket_reso_steps);
  if (c.clip) key += fmt::format(" fps {}", c.clip->fps);
  if (c.clip && c.clip->start != 0) key += fmt::format(" start {}", c.clip->start);
  if (c.unmasked_weight != 0 || c.loss_weight != 1)
    key += fmt::format(" weights {} {}", c.unmasked_weight, c.loss_weight);
  return key;
}

/// Values that encoded images, and encoded captions, depend on in addition to these: weights, configs and tokenizers of
/// the encoders.
struct EncoderIdentity {
  std::string images, captions;
};
EncoderIdentity models_key(ModelComponents& models, CachedText text) {
  const Family& family = *models.family();
  const FamilySpec& spec = family.spec();
  std::string types;
  EncoderKeys keys = models.options().keys;
  keys.visit([&types](const char* name, const auto& value, const auto&...) {
    if constexpr (std::is_same_v<decltype(value), const std::string&>)  // the location of weights does not matter
      if (!value.empty() && value != "float32") types += fmt::format(" {} {}", name, value);
  });
  const auto add = [](std::string& key, const std::string& name, const HostArray& a) {
    key += "\n" + name + " " + content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
  };
  EncoderIdentity out{.images = "images" + types, .captions = "captions" + types};
  std::string others;  // configs of the other encoders
  for (const auto& files : {models.folder().files(), models.folder().tokenizer_files()})
    for (const auto& [path, content] : files) {
      const std::string component = path.substr(0, path.find('/'));
      if (std::ranges::count(spec.denoisers, component) > 0 || component == "scheduler" || path == "model_index.json")
        continue;
      (component == spec.autoencoder->component ? out.images : others) += "\n" + path + " " + content_hash(content);
    }
  for (const auto& [name, a] : models.autoencoder_values()) add(out.images, name, a);

  const auto index = parse_json(models.folder().files().at("model_index.json"));
  for (const char* option : {"max_sequence_length", "text_encoder_out_layers", "reference_resolution"})
    if (index.contains(option)) others += fmt::format("\n{} {}", option, index.at(option).dump());
  out.captions +=
      fmt::format("\n{} {}", models.folder().pipeline(), text == CachedText::tokens ? "tokens" : "") + others;
  for (const Field& f : spec.conditioning) out.captions += fmt::format("\n{} {}", f.name, to_string(f.shape));
  if (text == CachedText::embeddings)
    for (const auto& [component, weights] : models.text_encoder().weights())
      for (const auto& [name, a] : weights) add(out.captions, component + "/" + name, a);
  for (const TextEncoderSpec& e : spec.text_encoders)
    for (const Placeholder& p : e.placeholders) out.captions += fmt::format("\n{} {} {}", e.component, p.text, p.count);
  for (const MediaSize& size : family.seen({{1024, 1024}}).sizes)
    out.captions += fmt::format("\nseen {}x{}", size.height, size.width);

  if (family.required_images() == 0) return out;
  // Models with the same autoencoder may need other conditioning images.
  const ImageConditioning& images = *family.image_conditioning();
  out.images += fmt::format("{}\nimages {}", others, images.min_images);
  const EncoderOptions& o = models.options();
  for (const Field& f : images.fields(training_size(o.sizes, o.resolution, family)))
    out.images += fmt::format(" {} {}", f.name, to_string(f.shape));
  if (const std::string& encoder = images.encoder; !encoder.empty())
    for (const auto& [name, a] : models.weights_of()(models.folder().params({encoder}), encoder))
      add(out.images, name, a);
  return out;
}

/// Number of images per part: as many as fit in a fixed amount of memory; two parts are in memory at a time.
int64_t images_together(const std::vector<ImageSize>& sizes) {
  constexpr int64_t kBytes = int64_t{256} << 20, kLeast = 4, kMost = 512;
  int64_t largest = 1;
  for (const ImageSize& s : sizes) largest = std::max(largest, s.height * s.width * s.frames * 3);
  return std::clamp(kBytes / largest, kLeast, kMost);
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
  Cached(std::shared_ptr<const CachedSamples> samples, const ImageConfig& config)
      : samples_(std::move(samples)), config_(config) {}
  int64_t size() const override { return samples_->size(); }
  HostArrays read(const ExampleRef& which) const override {
    HostArrays all = samples_->read(which.index), out;
    const bool flip = random_placement(config_, which.bits).flip;
    for (auto& [name, a] : all) {
      if (name.starts_with(kMirrored)) continue;
      const auto other = all.find(kMirrored + name);
      out.emplace(name, flip && other != all.end() ? other->second : a);
    }
    return out;
  }

 private:
  std::shared_ptr<const CachedSamples> samples_;
  ImageConfig config_;
};

/// The names of what is cached of a sample.
struct SampleItems {
  std::string image, caption;
};

/// The items of each bucket's samples.
std::vector<std::vector<SampleItems>> items_of(const ImagesInBuckets& images, const ImageConfig& config,
                                               const CacheConfig& cache, const CachedCaptions* captions) {
  check(images.keys.size() == images.records.size(), Code::internal, "latent cache: images without keys");
  std::vector<std::string> options = {options_key(config)};
  for (const ImageConfig& folder : config.folders) options.push_back(options[0] + "\n" + options_key(folder));
  const std::string replaced = captions && captions->caption ? content_hash(*captions->caption) : "";
  std::vector<std::vector<SampleItems>> out(images.keys.size());
  for (size_t b = 0; b < out.size(); ++b)
    for (const ImagesInBuckets::Key& key : images.keys[b]) {
      const size_t of_folder = config.folders.empty() ? 0 : static_cast<size_t>(key.folder) + 1;
      const std::string caption = replaced.empty() ? key.caption : replaced;
      std::string text = fmt::format("{}\nsize {}\n{}", options.at(of_folder), to_string(images.sizes[b]), key.media);
      if (cache.with_captions) text += "\ncaption " + caption;
      out[b].push_back({content_hash(text), captions ? caption : ""});
    }
  return out;
}

using Flags = std::vector<std::vector<bool>>;  // of each bucket's samples

/// Images that are encoded together: indices of one bucket's samples.
struct Group {
  size_t bucket;
  std::vector<size_t> samples;
};
/// The missing images among those that are read, each once.
std::vector<Group> missing_images(const std::vector<std::vector<SampleItems>>& items, const Flags& read,
                                  const Flags& damaged, const ArrayCache& cached, int64_t together) {
  std::vector<Group> groups;
  std::unordered_set<std::string> grouped;
  for (size_t b = 0; b < items.size(); ++b) {
    std::vector<size_t> missing;
    for (size_t i = 0; i < items[b].size(); ++i)
      if (read[b][i] && !damaged[b][i] && !cached.find(items[b][i].image) && grouped.insert(items[b][i].image).second)
        missing.push_back(i);
    for (size_t at = 0; at < missing.size(); at += static_cast<size_t>(together)) {
      const auto end =
          missing.begin() + static_cast<long>(std::min(missing.size(), at + static_cast<size_t>(together)));
      groups.push_back({b, {missing.begin() + static_cast<long>(at), end}});
    }
  }
  return groups;
}

/// The sample that is read instead of sample i: itself or, if it is damaged, the bucket's next one. None if all are.
std::optional<size_t> usable(const std::vector<bool>& damaged, size_t i) {
  for (size_t k = 0; k < damaged.size(); ++k)
    if (const size_t at = (i + k) % damaged.size(); !damaged[at]) return at;
  return {};
}

int64_t count_of(const Flags& flags) {
  int64_t n = 0;
  for (const auto& bucket : flags) n += std::ranges::count(bucket, true);
  return n;
}

/// Encodes and stores the captions of samples that are read, each once. `texts`: those that are known, by item; others
/// are read.
void add_captions(const ImagesInBuckets& images, const ImageConfig& config,
                  const std::vector<std::vector<SampleItems>>& items, const Flags& read, const Flags& damaged,
                  ArrayCache& to, const CachedCaptions& captions, std::unordered_map<std::string, std::string> texts) {
  std::vector<std::string> missing;
  for (size_t b = 0; b < items.size(); ++b)
    for (size_t i = 0; i < items[b].size(); ++i) {
      const SampleItems& sample = items[b][i];
      if (!read[b][i] || damaged[b][i] || to.find(sample.caption)) continue;
      const auto [known, fresh] = texts.try_emplace(sample.caption);
      if (fresh && captions.caption) {
        known->second = *captions.caption;
      } else if (fresh) {
        const Record r = images.source->read(images.records[b][i]);
        known->second = applied(config.of_folder(r.folder).captions, r.caption, 0, r.name);
      }
      missing.push_back(sample.caption);
    }
  std::ranges::sort(missing);
  missing.erase(std::ranges::unique(missing).begin(), missing.end());
  if (missing.empty()) return;
  ProgressBar bar("captions", std::ssize(missing), 0, true);
  for (size_t at = 0; at < missing.size(); at += static_cast<size_t>(captions.together)) {
    const size_t end = std::min(missing.size(), at + static_cast<size_t>(captions.together));
    std::vector<std::string> names, encoded;
    for (size_t i = at; i < end; ++i) names.push_back(missing[i]), encoded.push_back(texts.at(missing[i]));
    to.put(names, captions.encode(encoded));
    bar.update(static_cast<int64_t>(end), "");
  }
  bar.finish();
}

CachedImages cache_here(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                        const EncodeImages& encode, const CachedCaptions* captions) {
  const std::vector<std::vector<SampleItems>> items = items_of(images, config, cache, captions);
  const auto encoded_images = std::make_shared<ArrayCache>(cache.place.folder, cache.kind, cache.key);
  const auto encoded_captions =
      captions ? std::make_shared<ArrayCache>(cache.place.folder, "captions", captions->key) : nullptr;
  Flags damaged, all;
  for (const auto& bucket : items) damaged.emplace_back(bucket.size(), false), all.emplace_back(bucket.size(), true);
  Flags read = cache.read ? cache.read(images.records) : all;
  std::vector<std::string> image_items, caption_items;  // of samples that are read
  for (size_t b = 0; b < items.size(); ++b)
    for (size_t i = 0; i < items[b].size(); ++i)
      if (read[b][i]) image_items.push_back(items[b][i].image), caption_items.push_back(items[b][i].caption);
  encoded_images->open(image_items);
  if (captions) encoded_captions->open(caption_items);
  const auto present = [](const ArrayCache& in, const std::vector<std::string>& names) {
    return static_cast<int64_t>(
        std::ranges::count_if(names, [&](const auto& item) { return in.find(item).has_value(); }));
  };
  const int64_t count = count_of(all), wanted = count_of(read);
  int64_t done = present(*encoded_images, image_items);
  const int64_t captions_done = captions ? present(*encoded_captions, caption_items) : wanted;
  if (done < wanted || captions_done < wanted)
    log_info("caching {} in {}: {}{} of {}{} are cached already", cache.title, cache.place.folder,
             wanted < count ? fmt::format("of {} images the run reads {}; ", count, wanted) : "", done, wanted,
             captions ? fmt::format(" images and {} of {} captions", captions_done, wanted) : " images");
  std::unordered_map<std::string, std::string> texts;  // of new images, by item
  std::string first;                                   // reason for skipping an image
  const auto encode_groups = [&](const std::vector<Group>& missing) {
    const auto load = [&](size_t i) {
      const auto& [b, samples] = missing[i];
      std::vector<int64_t> records;
      for (const size_t k : samples) records.push_back(images.records[b][k]);
      return load_images(*images.source, records, config, config.several_sizes() ? &images.sizes[b] : nullptr);
    };
    ProgressBar bar(cache.title, count_of(read), done, true);
    const Encoded encoded = [&](int64_t n) { bar.update(done + n, ""); };
    std::future<LoadedImages> next;
    for (size_t i = 0; i < missing.size(); ++i) {
      const LoadedImages loaded = next.valid() ? next.get() : load(i);
      if (i + 1 < missing.size()) next = std::async(std::launch::async, load, i + 1);
      const auto& [b, samples] = missing[i];
      if (first.empty() && !loaded.skipped.empty()) first = loaded.skipped[0];
      if (loaded.names.empty()) continue;
      std::vector<std::string> names;
      for (size_t k = 0; const int64_t record : loaded.numbers) {
        while (images.records[b][samples[k]] != record) ++k;
        const SampleItems& sample = items[b][samples[k]];
        if (captions) texts[sample.caption] = captions->caption ? *captions->caption : loaded.captions[names.size()];
        names.push_back(sample.image);
      }
      encoded_images->put(names, encode(loaded, encoded));
      bar.update(done += std::ssize(names), "");
    }
    bar.finish();
  };
  for (;;) {
    const std::vector<Group> missing = missing_images(items, read, damaged, *encoded_images, cache.together);
    if (missing.empty()) break;
    encode_groups(missing);
    for (size_t b = 0; b < items.size(); ++b)
      for (size_t i = 0; i < items[b].size(); ++i)
        damaged[b][i] = read[b][i] && !encoded_images->find(items[b][i].image);
    for (size_t b = 0; b < items.size(); ++b)
      for (size_t i = 0; i < items[b].size(); ++i)
        if (damaged[b][i])
          if (const auto instead = usable(damaged[b], i)) read[b][*instead] = true;
  }
  if (captions) add_captions(images, config, items, read, damaged, *encoded_captions, *captions, std::move(texts));

  const int64_t unusable = count_of(damaged);
  CachedImages out{.sizes = {}, .buckets = {}, .images = count - unusable, .skipped = images.skipped + unusable};
  std::vector<std::string> used;
  for (size_t b = 0; b < items.size(); ++b) {
    const auto samples = std::make_shared<CachedSamples>(encoded_images, encoded_captions);
    for (size_t i = 0; i < items[b].size(); ++i) {
      if (damaged[b][i] && !cache.read) continue;
      const std::optional<size_t> at = usable(damaged[b], i);
      if (!at) break;
      if (!read[b][*at]) {
        samples->add_unread(images.records[b][*at]);
        continue;
      }
      const SampleItems& sample = items[b][*at];
      used.push_back(encoded_images->name() + "/" + sample.image);
      if (captions) used.push_back(encoded_captions->name() + "/" + sample.caption);
      samples->add(images.records[b][*at], encoded_images->find(sample.image).value(),
                   captions ? encoded_captions->find(sample.caption).value() : ArrayCache::Place());
    }
    if (samples->size() == 0) continue;
    out.sizes.push_back(images.sizes[b]);
    out.buckets.push_back(samples);
  }
  const std::string& name = images.source->name();
  check(!out.buckets.empty(), Code::io, "{}: none of {} images can be decoded; the first: {}", name, count, first);
  if (unusable > 0) log_warning("{}: {} of {} images cannot be decoded and are skipped", name, unusable, count);
  if (processes().is_coordinator()) record_used_items(cache.place, cache.title + " " + name, used);
  return out;
}

/// The images of a source, with keys; hashes of files are kept in the cache.
ImagesInBuckets images_with_keys(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                                 const CachePlace& cache) {
  FileHashes hashes(below(below(cache.folder, "hashes"), content_hash(source->name()) + ".txt"));
  ImagesInBuckets images = sort_into_aspect_buckets(source, config, true, &hashes);
  if (processes().is_coordinator()) hashes.save();
  return images;
}

}  // namespace

HostArrays CachedSamples::read(int64_t sample) const {
  const Sample& s = samples_.at(static_cast<size_t>(sample));
  check(s.cached, Code::internal, "sample {} is read, which the order of batches does not contain", sample);
  HostArrays out = images_->read(s.image);
  if (captions_) out.merge(captions_->read(s.caption));
  return out;
}

void CachedSamples::each(const std::string& name, const std::function<void(const HostArray&)>& take) const {
  for (const Sample& s : samples_) {
    if (!s.cached) continue;
    const HostArray a = images_->read(s.image).at(name);
    take(a.reshaped(batched(1, a.shape()).dims));
  }
}

CachedImages cache_images(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                          const EncodeImages& encode, const CachedCaptions* captions) {
  CachedImages out;
  processes().coordinator_first("cached " + cache.title,
                                [&] { out = cache_here(images, config, cache, encode, captions); });
  return out;
}

std::shared_ptr<const Examples> cached_examples(std::shared_ptr<const CachedSamples> samples,
                                                const ImageConfig& config) {
  return std::make_shared<Cached>(std::move(samples), config);
}

CachedImages encode_dataset(ModelComponents& models, const CachePlace& cache,
                            const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                            CachedText text, const std::string* caption, ImagesRead read) {
  const ImagesInBuckets images = images_with_keys(source, config, cache);
  // Of models that see reference images, texts are encoded with their images.
  const bool with_captions =
      text == CachedText::embeddings && config.references > 0 && models.family()->seen({{64, 64}}).tokens > 0;
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
      if (with_captions)
        for (const auto& [name, a] : models.text_encoder().encode(captions, {}, 0, 0, images)) out[prefix + name] = a;
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
    add("", loaded.pixels, loaded.mask, loaded.time_ids, loaded.references);
    if (!config.random_flip) return out;
    std::vector<HostArray> references;
    for (const HostArray& place : loaded.references) references.push_back(mirrored(place));
    add(kMirrored, mirrored(loaded.pixels), loaded.mirrored_mask, loaded.mirrored_time_ids, references);
    return out;
  };
  const EncoderIdentity identity = models_key(models, text);
  const CachedCaptions captions{.key = identity.captions,
                                .encode =
                                    [&](const std::vector<std::string>& texts) {
                                      return text == CachedText::tokens ? models.family()->tokenize(texts)
                                                                        : models.text_encoder().encode(texts);
                                    },
                                .caption = caption};
  return cache_images(
      images, config,
      {.place = cache,
       .key = identity.images + (with_captions ? "\n" + identity.captions + (caption ? *caption : "") : ""),
       .title = "latents and text embeddings",
       .together = images_together(images.sizes),
       .with_captions = with_captions,
       .read = std::move(read)},
      encode, with_captions || text == CachedText::none ? nullptr : &captions);
}

std::vector<std::vector<HostArray>> references_of(const std::vector<HostArray>& places, int64_t images) {
  std::vector<std::vector<HostArray>> out(places.empty() ? 0 : static_cast<size_t>(images));
  for (size_t k = 0; k < out.size(); ++k)
    for (const HostArray& place : places) out[k].push_back(row_of(place, static_cast<int64_t>(k)));
  return out;
}

int64_t images_to_encode(const CachePlace& cache, const std::shared_ptr<const RecordSource>& source,
                         const ImageConfig& config) {
  int64_t n = 0;
  for (const auto& records : images_with_keys(source, config, cache).records) n += std::ssize(records);
  return n;
}

CachedImages cache_pixels(const CachePlace& cache, const std::shared_ptr<const RecordSource>& source,
                          const ImageConfig& config) {
  const ImagesInBuckets images = images_with_keys(source, config, cache);
  ImageConfig plain = config;
  plain.random_flip = plain.sizes = false;
  plain.mask = MaskFrom::none;
  return cache_images(
      images, plain,
      {.place = cache, .key = "pixels", .title = "pixels", .together = images_together(images.sizes), .kind = "pixels"},
      [](const LoadedImages& loaded, const Encoded&) {
        return HostArrays{{"pixels", loaded.pixels}};
      });
}

}  // namespace md
