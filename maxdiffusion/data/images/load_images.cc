#include "maxdiffusion/data/images/load_images.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string_view>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/images/image_rows.h"

namespace md {
namespace {

/// Those of the same picture mirrored after the cut.
HostArray mirrored_ids(const PreparedImage& r) {
  HostArray a = HostArray::of<float>({DType::f32, {6}}, r.arrays.at("time_ids").view<float>());
  a.mutable_view<float>()[3] = static_cast<float>(left_of_mirrored(r.fit));
  return a;
}

}  // namespace

std::vector<std::string> each_group(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                                    int64_t together, const std::function<void(LoadedImages&& group)>& take) {
  check_image_config(config);
  check(!config.random_crop, Code::invalid_config,
        "random_crop: these pictures are made once; crops that change need pictures that are read while training");
  check(!config.clip || !config.clip->random_start, Code::invalid_config,
        "random_start: these clips are made once; starts that change need clips that are read while training");
  const auto most = static_cast<size_t>(together);
  std::vector<std::string> skipped;
  size_t all = 0;
  ReadingProgress progress(source->size());
  RecordStream stream(source, {.shuffle = false, .window = together});
  for (bool more = true; more;) {
    std::vector<PendingRecord> pending;
    while (more && pending.size() < most) {
      RecordStream::Next n = stream.next();
      more = n.epoch == 0;
      if (more) pending.push_back(std::move(n.read));
    }
    std::vector<PreparedImage> made(pending.size());
    std::vector<std::string> hashes(pending.size()), reasons(pending.size());
    std::vector<Record> records(pending.size());
    parallel_for(static_cast<int64_t>(pending.size()), [&](int64_t i, int) {
      const auto k = static_cast<size_t>(i);
      Record record = pending[k]();
      try {
        made[k] = prepare_image(record, config, {});
        if (config.sizes) made[k].arrays["mirrored_time_ids"] = mirrored_ids(made[k]);
        const std::string_view pixels(reinterpret_cast<const char*>(record.pixels.data()),
                                      record.pixels ? record.pixels.bytes() : 0);
        std::string frames;  // hashes of a clip's pictures
        for (const Blob& f : record.frames) frames += content_hash(f.bytes);
        hashes[k] = content_hash(record.pixels ? pixels : !frames.empty() ? frames : record.image.bytes);
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
        reasons[k] = e.message();
      }
      record.image = record.mask = {}, record.pixels = {}, record.frames.clear();
      records[k] = std::move(record);
      progress.step();
    });
    struct Group {
      LoadedImages pictures;
      std::vector<ImageRow> rows;
    };
    std::map<ImageSize, Group, SizeOrder> groups;
    for (size_t k = 0; k < pending.size(); ++k) {
      ++all;
      if (made[k].arrays.empty()) {
        log_warning("skipped {}", reasons[k]);
        skipped.push_back(reasons[k]);
        continue;
      }
      auto& [part, rows] = groups[made[k].fit.size];
      const std::string resized = config.buckets ? to_string(made[k].fit.resized) + " " : "";
      part.fingerprint +=
          fmt::format("{}{} {}:{}\n", resized, hashes[k], records[k].caption.size(), records[k].caption);
      rows.push_back({.arrays = std::move(made[k].arrays), .caption = {}, .name = records[k].name, .fault = {}});
      part.names.push_back(std::move(records[k].name));
      part.captions.push_back(std::move(records[k].caption));
    }
    for (auto& [size, group] : groups) {
      HostArrays arrays = stack_rows(group.rows);
      LoadedImages& part = group.pictures;
      part.pixels = arrays["pixels"], part.mask = arrays["mask"];
      part.time_ids = arrays["time_ids"], part.mirrored_time_ids = arrays["mirrored_time_ids"];
      arrays.clear();
      take(std::move(part));
    }
  }
  if (!skipped.empty()) {
    check(skipped.size() < all, Code::io, "{}: none of {} pictures decodes; the first: {}", source->name(), all,
          skipped[0]);
    log_warning("{}: {} of {} pictures do not decode and were skipped", source->name(), skipped.size(), all);
  }
  return skipped;
}

std::vector<LoadedImages> load_in_aspect_buckets(const std::shared_ptr<const RecordSource>& source,
                                                 const ImageConfig& config) {
  std::map<ImageSize, std::vector<LoadedImages>, SizeOrder> buckets;  // parts
  std::vector<std::string> skipped = each_group(source, config, 1024, [&](LoadedImages&& part) {
    buckets[size_of_pixels(part.pixels, config.clip.has_value())].push_back(std::move(part));
  });
  std::vector<LoadedImages> out;
  for (auto& [size, parts] : buckets) {
    LoadedImages p;
    std::string content;
    for (LoadedImages& part : parts) {
      content += part.fingerprint;
      std::ranges::move(part.names, std::back_inserter(p.names));
      std::ranges::move(part.captions, std::back_inserter(p.captions));
    }
    for (auto field :
         {&LoadedImages::pixels, &LoadedImages::mask, &LoadedImages::time_ids, &LoadedImages::mirrored_time_ids}) {
      if (!(parts[0].*field)) continue;
      Dims dims = (parts[0].*field).dims();
      dims[0] = static_cast<int64_t>(p.names.size());
      p.*field = HostArray(Shape{(parts[0].*field).dtype(), dims});
      std::byte* to = (p.*field).mutable_data();
      for (LoadedImages& part : parts) {
        to = std::copy_n((part.*field).data(), (part.*field).bytes(), to);
        part.*field = {};  // so that there is little more than one copy at any time
      }
    }
    p.fingerprint = content_hash(fmt::format("pictures 3 {} {} {} {}{}\n{}", to_string(size), config.center_crop,
                                             config.random_flip, config.mask == MaskFrom::alpha,
                                             config.clip ? fmt::format(" fps {}", config.clip->fps) : "", content));
    out.push_back(std::move(p));
  }
  out[0].skipped = std::move(skipped);
  return out;
}

LoadedImages load_images(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config) {
  check(!config.buckets, Code::internal, "load_images: buckets are loaded by load_in_aspect_buckets");
  return std::move(load_in_aspect_buckets(source, config)[0]);
}

}  // namespace md
