#include "maxdiffusion/data/pictures.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/parallel.h"
#include "maxdiffusion/data/resize.h"
#include "maxdiffusion/data/shuffle.h"

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

void check_config(const PictureConfig& c) {
  check(c.resolution > 0, Code::invalid_config, "resolution: {}; expected > 0", c.resolution);
  check(!(c.center_crop && c.random_crop), Code::invalid_config, "center_crop and random_crop exclude each other");
}

/// The picture of a record, ready. Throws io.
HostArray ready(const Record& r, const PictureConfig& c, const Placement& p) {
  check(r.fault.empty(), Code::io, "{}", r.fault);
  if (r.pixels) return fit_image(r.pixels, c, p);
  return fit_image(decode_image_bytes(r.picture.bytes.data(), r.picture.bytes.size(), r.name, c.resolution), c, p);
}

/// One record of a batch.
struct Row {
  Batch arrays;
  std::string caption, name, fault;
};

Batch stacked(const std::vector<Row>& rows) {
  Batch out;
  for (const auto& [name, first] : rows[0].arrays) {
    Dims dims = first.dims();
    dims.insert(dims.begin(), static_cast<int64_t>(rows.size()));
    HostArray all(Shape{first.dtype(), dims});
    std::byte* to = all.mutable_data();
    for (const Row& r : rows) {
      const auto it = r.arrays.find(name);
      check(it != r.arrays.end() && it->second.shape() == first.shape(), Code::io, "{}: '{}' is {}; in {} it is {}",
            r.name, name, it == r.arrays.end() ? "absent" : to_string(it->second.shape()), rows[0].name,
            to_string(first.shape()));
      to = std::copy_n(it->second.data(), first.bytes(), to);
    }
    out.emplace(name, std::move(all));
  }
  return out;
}

class SourceBatches : public Dataset {
 public:
  using MakeRow = std::function<Row(const RecordStream::Next&)>;
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
          [&](int64_t i, int) { made[static_cast<size_t>(i)] = make_(taken[static_cast<size_t>(i)]); },
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
    Batch out = stacked(rows);
    if (captions_) {
      std::vector<std::string> texts;
      for (Row& r : rows) texts.push_back(std::move(r.caption));
      out.merge(captions_(texts));
    }
    return out;
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

HostArray fit_image(const HostArray& rgb, const PictureConfig& config, const Placement& placement) {
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1], r = config.resolution;
  HostArray out = rgb;
  if (config.center_crop || config.random_crop) {
    // torchvision: the long side is cut to a whole number; the centre's offset is rounded half to even, a drawn one is
    // any with the same probability.
    const int64_t th = h <= w ? r : r * h / w, tw = h <= w ? r * w / h : r;
    const auto offset = [&](int64_t size, double place) {
      const auto last = static_cast<double>(size - r);
      return static_cast<int64_t>(config.center_crop ? std::nearbyint(last * place)
                                                     : std::min(std::floor((last + 1) * place), last));
    };
    out = crop_rgb8(resize_rgb8(rgb, th, tw), offset(th, placement.y), offset(tw, placement.x), r, r);
  } else {
    out = resize_rgb8(rgb, r, r);
  }
  return placement.flip ? flip_rgb8(out) : out;
}

Placement draw_placement(const PictureConfig& config, uint64_t bits) {
  const auto uniform = [&] { return static_cast<double>((bits = mix(bits)) >> 11) * 0x1p-53; };
  Placement p;
  const bool flip = uniform() < 0.5;
  p.flip = config.random_flip && flip;
  if (config.random_crop) p.y = uniform(), p.x = uniform();
  return p;
}

std::vector<std::string> each_part(std::shared_ptr<const RecordSource> source, const PictureConfig& config,
                                   int64_t together, const std::function<void(LoadedPictures&& part)>& take) {
  check_config(config);
  check(!config.random_crop, Code::invalid_config,
        "random_crop: these pictures are made once; crops that change need pictures that are read while training");
  const auto most = static_cast<size_t>(together);
  std::vector<std::string> skipped;
  int64_t good = 0;
  Progress progress(source->size());
  RecordStream stream(source, {.shuffle = false, .window = together});
  for (bool more = true; more;) {
    std::vector<PendingRecord> pending;
    while (more && pending.size() < most) {
      RecordStream::Next n = stream.next();
      more = n.epoch == 0;
      if (more) pending.push_back(std::move(n.read));
    }
    std::vector<HostArray> fitted(pending.size());
    std::vector<std::string> hashes(pending.size()), reasons(pending.size());
    std::vector<Record> records(pending.size());
    parallel_for(static_cast<int64_t>(pending.size()), [&](int64_t i, int) {
      const auto k = static_cast<size_t>(i);
      Record record = pending[k]();
      try {
        fitted[k] = ready(record, config, {});
        const std::string_view pixels(reinterpret_cast<const char*>(record.pixels.data()),
                                      record.pixels ? record.pixels.bytes() : 0);
        hashes[k] = content_hash(record.pixels ? pixels : record.picture.bytes);
      } catch (const Error& e) {
        if (e.code() != Code::io) throw;
        reasons[k] = e.message();
      }
      record.picture = {}, record.pixels = {};
      records[k] = std::move(record);
      progress.step();
    });
    LoadedPictures part;
    const auto rows = std::ranges::count_if(fitted, [](const HostArray& a) { return bool(a); });
    part.pixels = HostArray(Shape{DType::u8, {rows, config.resolution, config.resolution, 3}});
    std::byte* to = part.pixels.mutable_data();
    for (size_t k = 0; k < pending.size(); ++k) {
      if (!fitted[k]) {
        log_warning("skipped {}", reasons[k]);
        skipped.push_back(reasons[k]);
        continue;
      }
      to = std::copy_n(fitted[k].data(), fitted[k].bytes(), to);
      fitted[k] = {};
      part.fingerprint += fmt::format("{} {}:{}\n", hashes[k], records[k].caption.size(), records[k].caption);
      part.names.push_back(std::move(records[k].name));
      part.captions.push_back(std::move(records[k].caption));
    }
    good += rows;
    if (rows > 0) take(std::move(part));
  }
  if (!skipped.empty()) {
    const int64_t all = good + static_cast<int64_t>(skipped.size());
    check(good > 0, Code::io, "{}: none of {} pictures decodes; the first: {}", source->name(), all, skipped[0]);
    log_warning("{}: {} of {} pictures do not decode and were skipped", source->name(), skipped.size(), all);
  }
  return skipped;
}

LoadedPictures load_pictures(std::shared_ptr<const RecordSource> source, const PictureConfig& config) {
  LoadedPictures out;
  std::vector<HostArray> parts;
  out.fingerprint = fmt::format("pictures 2 {} {} {}\n", config.resolution, config.center_crop, config.random_flip);
  out.skipped = each_part(source, config, 1024, [&](LoadedPictures&& part) {
    out.fingerprint += part.fingerprint;
    std::ranges::move(part.names, std::back_inserter(out.names));
    std::ranges::move(part.captions, std::back_inserter(out.captions));
    parts.push_back(std::move(part.pixels));
  });
  const int64_t r = config.resolution;
  out.pixels = HostArray(Shape{DType::u8, {static_cast<int64_t>(out.names.size()), r, r, 3}});
  std::byte* to = out.pixels.mutable_data();
  for (HostArray& part : parts) {
    to = std::copy_n(part.data(), part.bytes(), to);
    part = {};  // so that there is little more than one copy at any time
  }
  out.fingerprint = content_hash(out.fingerprint);
  return out;
}

std::unique_ptr<Dataset> picture_batches(std::shared_ptr<const RecordSource> source, const PictureConfig& pictures,
                                         const BatchConfig& config, EncodeCaptions captions) {
  check_config(pictures);
  const auto make = [pictures](const RecordStream::Next& n) {
    Record r = n.read();
    Row row{.caption = std::move(r.caption), .name = r.name};
    try {
      row.arrays.emplace("pixels", ready(r, pictures, draw_placement(pictures, n.draw)));
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      row.fault = e.message();
    }
    return row;
  };
  return std::make_unique<SourceBatches>(std::move(source), config, make, std::move(captions));
}

std::unique_ptr<Dataset> array_batches(std::shared_ptr<const RecordSource> source, const BatchConfig& config) {
  const auto make = [](const RecordStream::Next& n) {
    Record r = n.read();
    return Row{.arrays = std::move(r.arrays), .name = std::move(r.name)};
  };
  return std::make_unique<SourceBatches>(std::move(source), config, make, nullptr);
}

}  // namespace md
