#include "maxdiffusion/data/images/prepare.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/images/resize.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

// Reports "n of m" at most every five seconds, from any thread.
class Progress {
 public:
  explicit Progress(int64_t total) : total_(total) {}  // −1: not known
  void step() {
    const int64_t done = ++done_;
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(5)) return;
    last_ = now;
    log_info("read {}{} pictures", done, total_ < 0 ? "" : fmt::format(" of {}", total_));
  }

 private:
  const int64_t total_;
  std::atomic<int64_t> done_ = 0;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

void check_config(const ImageConfig& c) {
  check(c.resolution > 0, Code::invalid_config, "resolution: {}; expected > 0", c.resolution);
  check(!(c.center_crop && c.random_crop), Code::invalid_config, "center_crop and random_crop exclude each other");
}

/// The longest side that a picture can be asked for.
int64_t longest_side(const ImageConfig& c) {
  int64_t side = c.resolution;
  if (c.buckets)
    for (const ImageSize& s : c.buckets->sizes()) side = std::max({side, s.height, s.width});
  return side;
}

DecodedImage decoded(const Record& r, const ImageConfig& c, bool only_size = false) {
  check(r.fault.empty(), Code::io, "{}", r.fault);
  if (r.pixels) return {.rgb = r.pixels, .size = {r.pixels.dims()[0], r.pixels.dims()[1]}};
  return decode_stored_image(
      r.picture.bytes.data(), r.picture.bytes.size(), r.name,
      {.side = only_size ? 0 : longest_side(c), .alpha = c.mask == MaskFrom::alpha, .only_size = only_size});
}

/// fit_of, naming the record in its error.
Fit fit_of_record(const Record& r, ImageSize size, const ImageConfig& config, const Placement& placement) {
  try {
    return fit_of(size, config, placement);
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", r.name, e.message());
  }
}

HostArray fitted(const HostArray& rgb, const Fit& f, bool flip) {
  HostArray out = resize_rgb8(rgb, f.resized.height, f.resized.width);
  if (f.resized != f.size) out = crop_rgb8(out, f.top, f.left, f.size.height, f.size.width);
  return flip ? flip_rgb8(out) : out;
}

/// Means over cells of `cell` × `cell` pixels, of 255.
HostArray weights_of(const HostArray& rgb, int64_t cell) {
  const int64_t h = rgb.dims()[0] / cell, w = rgb.dims()[1] / cell;
  check(h * cell == rgb.dims()[0] && w * cell == rgb.dims()[1], Code::invalid_config,
        "masks of {}x{} pixels do not divide into latents of {}x{} each", rgb.dims()[1], rgb.dims()[0], cell, cell);
  HostArray out(Shape{DType::f32, {h, w, 1}});
  const auto from = rgb.view<uint8_t>();
  auto to = out.mutable_view<float>();
  for (int64_t y = 0; y < h; ++y)
    for (int64_t x = 0; x < w; ++x) {
      int64_t sum = 0;
      for (int64_t i = y * cell; i < (y + 1) * cell; ++i)
        for (int64_t k = x * cell; k < (x + 1) * cell; ++k)
          sum += from[static_cast<size_t>((i * rgb.dims()[1] + k) * 3)];
      to[static_cast<size_t>(y * w + x)] =
          static_cast<float>(static_cast<double>(sum) / static_cast<double>(255 * cell * cell));
    }
  return out;
}

HostArray ones(Dims dims) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  std::ranges::fill(a.mutable_view<float>(), 1.0f);
  return a;
}

HostArray mask_of(const Record& r, const DecodedImage& picture, const ImageConfig& c, const Fit& fit, bool flip) {
  const int64_t cell = c.mask_downscale;
  if (c.mask == MaskFrom::alpha) {
    if (!picture.alpha) return ones({fit.size.height / cell, fit.size.width / cell, 1});
    return weights_of(fitted(picture.alpha, fit, flip), cell);
  }
  check(!r.mask.bytes.empty(), Code::invalid_config, "{}: it has no mask", r.name);
  const std::string name = "mask of " + r.name;
  const DecodedImage mask =
      decode_stored_image(r.mask.bytes.data(), r.mask.bytes.size(), name, {.side = longest_side(c)});
  check(mask.size == picture.size, Code::invalid_config, "{}: it has {} pixels, the picture {}", name,
        to_string(mask.size), to_string(picture.size));
  return weights_of(fitted(mask.rgb, fit, flip), cell);
}

/// Where the cut of the mirrored picture starts.
int64_t left_of_mirrored(const Fit& f) { return f.resized.width - f.size.width - f.left; }

HostArray time_ids(ImageSize original, const Fit& f, bool flip) {
  const int64_t left = flip ? left_of_mirrored(f) : f.left;
  HostArray a(Shape{DType::f32, {6}});
  auto v = a.mutable_view<float>();
  size_t i = 0;
  for (int64_t n : {original.height, original.width, f.top, left, f.size.height, f.size.width})
    v[i++] = static_cast<float>(n);
  return a;
}

/// Those of the same picture mirrored after the cut.
HostArray mirrored_ids(const PreparedImage& r) {
  HostArray a = HostArray::of<float>({DType::f32, {6}}, r.arrays.at("time_ids").view<float>());
  a.mutable_view<float>()[3] = static_cast<float>(left_of_mirrored(r.fit));
  return a;
}

/// By width, then height, as Buckets orders them.
std::pair<int64_t, int64_t> order_key(ImageSize s) { return {s.width, s.height}; }

/// One record of a batch.
struct Row {
  Batch arrays;
  std::string caption, name, fault;
};

/// The arrays called `name` of all rows, which lose them: there is little more than one copy at any time.
HostArray joined(std::vector<Row>& rows, const std::string& name) {
  const Shape first = rows[0].arrays.at(name).shape();
  Dims dims = first.dims;
  dims.insert(dims.begin(), static_cast<int64_t>(rows.size()));
  HostArray all(Shape{first.dtype, dims});
  std::byte* to = all.mutable_data();
  for (Row& r : rows) {
    auto it = r.arrays.find(name);
    check(it != r.arrays.end() && it->second.shape() == first, Code::io, "{}: '{}' is {}; in {} it is {}", r.name, name,
          it == r.arrays.end() ? "absent" : to_string(it->second.shape()), rows[0].name, to_string(first));
    to = std::copy_n(it->second.data(), it->second.bytes(), to);
    it->second = {};
  }
  return all;
}

Batch stacked(std::vector<Row>& rows) {
  Batch out;
  for (const auto& [name, first] : rows[0].arrays) out.emplace(name, HostArray());
  for (auto& [name, a] : out) a = joined(rows, name);
  return out;
}

Batch batch_of(std::vector<Row>& rows, const EncodeCaptions& captions) {
  Batch out = stacked(rows);
  if (captions) {
    std::vector<std::string> texts;
    for (const Row& r : rows) texts.push_back(r.caption);
    out.merge(captions(texts));
  }
  return out;
}

Row picture_row(const PendingRecord& read, uint64_t draw, const ImageConfig& config) {
  Record r = read();
  Row row{.caption = r.caption, .name = r.name};
  try {
    row.arrays = prepare_image(r, config, draw_placement(config, draw)).arrays;
  } catch (const Error& e) {
    if (e.code() != Code::io) throw;
    row.fault = e.message();
  }
  return row;
}

/// Records of shards by number.
class Placed : public RecordSource {
 public:
  using Place = std::pair<int64_t, int64_t>;  // shard, offset
  Placed(std::shared_ptr<const RecordSource> source, std::vector<Place> places)
      : RecordSource(source->name(), source->fingerprint()), source_(std::move(source)), places_(std::move(places)) {}
  int64_t size() const override { return static_cast<int64_t>(places_.size()); }
  Record read(int64_t index) const override {
    const auto [shard, offset] = places_[static_cast<size_t>(index)];
    auto record = source_->open(shard, offset)->next();
    check(record.has_value(), Code::io, "{}: record {} is not there any more", name(), index);
    return (*record)();
  }

 private:
  std::shared_ptr<const RecordSource> source_;
  std::vector<Place> places_;
};

class InBuckets : public Dataset {
 public:
  InBuckets(ImagesInBuckets pictures, const std::vector<int64_t>& counts, const ImageConfig& config,
            const BatchConfig& batches, EncodeCaptions captions)
      : pictures_(std::move(pictures)),
        config_(config),
        batches_(batches),
        captions_(std::move(captions)),
        order_(counts, batches.batch, batches.stream) {}
  Batch next() override {
    const AspectBucketOrder::Taken taken = order_.next();
    const std::vector<int64_t>& records = pictures_.records[taken.bucket];
    std::vector<Row> rows(taken.samples.size());
    std::mutex mutex;
    parallel_for(
        static_cast<int64_t>(rows.size()),
        [&](int64_t i, int) {
          const AspectBucketOrder::Sample& s = taken.samples[static_cast<size_t>(i)];
          Row& row = rows[static_cast<size_t>(i)];
          for (size_t later = 0; later < records.size(); ++later) {
            const int64_t record = records[(static_cast<size_t>(s.index) + later) % records.size()];
            row = picture_row([&] { return pictures_.source->read(record); }, s.draw, config_);
            if (row.fault.empty()) return;
            const std::lock_guard lock(mutex);
            if (named_.insert(row.fault).second) log_warning("skipped {} ({} so far)", row.fault, named_.size());
          }
          fail(Code::io, "{}: no picture of bucket {} decodes; the last: {}", pictures_.source->name(),
               to_string(pictures_.sizes[taken.bucket]), row.fault);
        },
        batches_.workers);
    return batch_of(rows, captions_);
  }
  Position position() const override { return order_.position(); }
  void seek(Position p) override { order_.seek(p); }
  int64_t size() const override { return order_.size(); }

 private:
  ImagesInBuckets pictures_;
  ImageConfig config_;
  BatchConfig batches_;
  EncodeCaptions captions_;
  AspectBucketOrder order_;
  std::set<std::string> named_;  // pictures that were skipped
};

class SourceBatches : public Dataset {
 public:
  using MakeRow = std::function<Row(const PendingRecord& read, uint64_t draw)>;
  SourceBatches(std::shared_ptr<const RecordSource> source, const BatchConfig& config, MakeRow make,
                EncodeCaptions captions)
      : stream_(std::move(source), config.stream),
        config_(config),
        make_(std::move(make)),
        captions_(std::move(captions)) {
    check(config.batch > 0, Code::invalid_config, "batch size: {}; expected > 0", config.batch);
  }
  Batch next() override {
    std::vector<Row> rows;
    while (static_cast<int64_t>(rows.size()) < config_.batch) {
      std::vector<RecordStream::Next> taken;
      for (auto n = static_cast<int64_t>(rows.size()); n < config_.batch; ++n) taken.push_back(stream_.next());
      std::vector<Row> made(taken.size());
      parallel_for(
          static_cast<int64_t>(taken.size()),
          [&](int64_t i, int) {
            made[static_cast<size_t>(i)] =
                make_(taken[static_cast<size_t>(i)].read, taken[static_cast<size_t>(i)].draw);
          },
          config_.workers);
      for (size_t i = 0; i < made.size(); ++i) {
        if (made[i].fault.empty()) {
          last_good_epoch_ = taken[i].epoch;
          rows.push_back(std::move(made[i]));
          continue;
        }
        if (named_.insert(made[i].fault).second) log_warning("skipped {} ({} so far)", made[i].fault, named_.size());
        check(taken[i].epoch < last_good_epoch_ + 2, Code::io, "{}: no picture of a whole epoch decodes; the last: {}",
              stream_.source().name(), made[i].fault);
      }
    }
    return batch_of(rows, captions_);
  }
  Position position() const override { return stream_.position(); }
  void seek(Position p) override {
    stream_.seek(p);
    last_good_epoch_ = p.epoch;
  }
  int64_t size() const override { return stream_.source().size(); }

 private:
  RecordStream stream_;
  BatchConfig config_;
  MakeRow make_;
  EncodeCaptions captions_;
  int64_t last_good_epoch_ = 0;
  std::set<std::string> named_;  // pictures that were skipped
};

}  // namespace

Fit fit_of(ImageSize picture, const ImageConfig& config, const Placement& placement) {
  const int64_t h = picture.height, w = picture.width, r = config.resolution;
  Fit f{.resized = {r, r}, .size = {r, r}};
  if (config.buckets) {
    const AspectBuckets::Choice choice = config.buckets->choose(picture);
    f = {.resized = choice.resized, .size = choice.size};
  } else if (config.center_crop || config.random_crop) {
    f.resized = h <= w ? ImageSize{r, r * w / h} : ImageSize{r * h / w, r};
  }
  // torchvision: the long side is cut to a whole number; the centre's offset is rounded half to even, a drawn one is
  // any with the same probability.
  const auto offset = [&](int64_t over, double place) {
    const auto last = static_cast<double>(over);
    return static_cast<int64_t>(config.random_crop ? std::min(std::floor((last + 1) * place), last)
                                                   : std::nearbyint(last * place));
  };
  f.top = offset(f.resized.height - f.size.height, placement.y);
  f.left = offset(f.resized.width - f.size.width, placement.x);
  return f;
}

HostArray fit_image(const HostArray& rgb, const ImageConfig& config, const Placement& placement) {
  return fitted(rgb, fit_of({rgb.dims()[0], rgb.dims()[1]}, config, placement), placement.flip);
}

PreparedImage prepare_image(const Record& record, const ImageConfig& config, const Placement& placement) {
  const DecodedImage picture = decoded(record, config);
  PreparedImage r{.arrays = {}, .fit = fit_of_record(record, picture.size, config, placement)};
  r.arrays["pixels"] = fitted(picture.rgb, r.fit, placement.flip);
  if (config.mask != MaskFrom::none) r.arrays["mask"] = mask_of(record, picture, config, r.fit, placement.flip);
  if (config.sizes) r.arrays["time_ids"] = time_ids(picture.size, r.fit, placement.flip);
  return r;
}

Placement draw_placement(const ImageConfig& config, uint64_t bits) {
  const auto uniform = [&] { return static_cast<double>((bits = mix(bits)) >> 11) * 0x1p-53; };
  Placement p;
  const bool flip = uniform() < 0.5;
  p.flip = config.random_flip && flip;
  if (config.random_crop) p.y = uniform(), p.x = uniform();
  return p;
}

std::vector<std::string> each_group(std::shared_ptr<const RecordSource> source, const ImageConfig& config,
                                    int64_t together, const std::function<void(LoadedImages&& part)>& take) {
  check_config(config);
  check(!config.random_crop, Code::invalid_config,
        "random_crop: these pictures are made once; crops that change need pictures that are read while training");
  const auto most = static_cast<size_t>(together);
  std::vector<std::string> skipped;
  size_t all = 0;
  Progress progress(source->size());
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
        hashes[k] = content_hash(record.pixels ? pixels : record.picture.bytes);
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
        reasons[k] = e.message();
      }
      record.picture = record.mask = {}, record.pixels = {};
      records[k] = std::move(record);
      progress.step();
    });
    struct Group {
      LoadedImages pictures;
      std::vector<Row> rows;
    };
    std::map<std::pair<int64_t, int64_t>, Group> groups;  // by width and height
    for (size_t k = 0; k < pending.size(); ++k) {
      ++all;
      if (made[k].arrays.empty()) {
        log_warning("skipped {}", reasons[k]);
        skipped.push_back(reasons[k]);
        continue;
      }
      auto& [part, rows] = groups[order_key(made[k].fit.size)];
      const std::string resized = config.buckets ? to_string(made[k].fit.resized) + " " : "";
      part.fingerprint +=
          fmt::format("{}{} {}:{}\n", resized, hashes[k], records[k].caption.size(), records[k].caption);
      rows.push_back({.arrays = std::move(made[k].arrays), .caption = {}, .name = records[k].name, .fault = {}});
      part.names.push_back(std::move(records[k].name));
      part.captions.push_back(std::move(records[k].caption));
    }
    for (auto& [size, group] : groups) {
      Batch arrays = stacked(group.rows);
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

std::vector<LoadedImages> load_in_aspect_buckets(std::shared_ptr<const RecordSource> source,
                                                 const ImageConfig& config) {
  std::map<std::pair<int64_t, int64_t>, std::vector<LoadedImages>> buckets;  // parts, by width and height
  std::vector<std::string> skipped = each_group(std::move(source), config, 1024, [&](LoadedImages&& part) {
    const Dims& d = part.pixels.dims();
    buckets[order_key({d[1], d[2]})].push_back(std::move(part));
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
    p.fingerprint =
        content_hash(fmt::format("pictures 3 {}x{} {} {} {}\n{}", size.first, size.second, config.center_crop,
                                 config.random_flip, config.mask == MaskFrom::alpha, content));
    out.push_back(std::move(p));
  }
  out[0].skipped = std::move(skipped);
  return out;
}

LoadedImages load_images(std::shared_ptr<const RecordSource> source, const ImageConfig& config) {
  check(!config.buckets, Code::internal, "load_images: buckets are loaded by load_in_aspect_buckets");
  return std::move(load_in_aspect_buckets(std::move(source), config)[0]);
}

std::unique_ptr<Dataset> image_batches(std::shared_ptr<const RecordSource> source, const ImageConfig& pictures,
                                       const BatchConfig& config, EncodeCaptions captions) {
  check_config(pictures);
  const auto make = [pictures](const PendingRecord& read, uint64_t draw) { return picture_row(read, draw, pictures); };
  return std::make_unique<SourceBatches>(std::move(source), config, make, std::move(captions));
}

ImagesInBuckets sort_into_aspect_buckets(std::shared_ptr<const RecordSource> source, const ImageConfig& config) {
  check_config(config);
  constexpr size_t kTogether = 1024;
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> buckets;  // by width and height
  std::vector<Placed::Place> places;
  std::vector<PendingRecord> pending;
  int64_t number = 0;
  std::vector<std::string> skipped;
  Progress progress(source->size());
  const auto sort = [&] {
    std::vector<ImageSize> sizes(pending.size());
    std::vector<std::string> reasons(pending.size());
    parallel_for(static_cast<int64_t>(pending.size()), [&](int64_t i, int) {
      const auto k = static_cast<size_t>(i);
      const Record r = pending[k]();
      try {
        sizes[k] = fit_of_record(r, decoded(r, config, true).size, config, {}).size;
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
        reasons[k] = e.message();
      }
      progress.step();
    });
    for (size_t k = 0; k < pending.size(); ++k, ++number) {
      if (reasons[k].empty()) {
        buckets[order_key(sizes[k])].push_back(number);
      } else {
        log_warning("skipped {}", reasons[k]);
        skipped.push_back(reasons[k]);
      }
    }
    pending.clear();
  };
  if (source->shards() == 0) {
    for (int64_t i = 0; i < source->size(); ++i) {
      pending.push_back([&source, i] { return source->read(i); });
      if (pending.size() == kTogether) sort();
    }
  } else {
    for (int64_t s = 0; s < source->shards(); ++s) {
      const auto reader = source->open(s, 0);
      for (int64_t at = reader->offset(); auto record = reader->next(); at = reader->offset()) {
        places.emplace_back(s, at);
        pending.push_back(std::move(*record));
        if (pending.size() == kTogether) sort();
      }
    }
  }
  sort();
  check(!buckets.empty(), Code::io, "{}: no picture of {} fits a bucket; the first: {}", source->name(), number,
        skipped.empty() ? "there is none" : skipped[0]);
  if (!skipped.empty()) log_warning("{}: {} of {} pictures were skipped", source->name(), skipped.size(), number);
  ImagesInBuckets out{.source = source, .sizes = {}, .records = {}};
  if (source->shards() > 0) out.source = std::make_shared<Placed>(source, std::move(places));
  for (auto& [size, records] : buckets) {
    out.sizes.push_back({size.second, size.first});
    out.records.push_back(std::move(records));
  }
  return out;
}

std::unique_ptr<Dataset> image_batches(ImagesInBuckets pictures, const ImageConfig& config, const BatchConfig& batches,
                                       EncodeCaptions captions) {
  std::vector<int64_t> counts;
  for (const auto& records : pictures.records) counts.push_back(static_cast<int64_t>(records.size()));
  return std::make_unique<InBuckets>(std::move(pictures), counts, config, batches, std::move(captions));
}

std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config) {
  const auto make = [](const PendingRecord& read, uint64_t) {
    Record r = read();
    return Row{.arrays = std::move(r.arrays), .name = std::move(r.name)};
  };
  return std::make_unique<SourceBatches>(std::move(source), config, make, nullptr);
}

}  // namespace md
