#include "maxdiffusion/data/images/load_images.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/image_rows.h"

namespace md {
namespace {

/// time_ids of the same image mirrored after the crop.
HostArray mirrored_ids(const PreparedImage& r) {
  HostArray a = HostArray::of<float>({DType::f32, {6}}, r.arrays.at("time_ids").view<float>());
  a.mutable_view<float>()[3] = static_cast<float>(mirrored_left(r.fit));
  return a;
}

}  // namespace

LoadedImages load_images(const RecordSource& source, const std::vector<int64_t>& records, const ImageConfig& config,
                         const ImageSize* size) {
  check_image_config(config);
  check(!config.random_crop, Code::invalid_config,
        "random_crop=true: these images are prepared once; random crops need images that are read in each step");
  check(!config.clip || !config.clip->random_start, Code::invalid_config,
        "random_start=true: these clips are prepared once; random starts need clips that are read in each step");
  const std::vector<PendingRecord> pending = source.find(records);
  std::vector<ImageRow> rows(pending.size());
  parallel_for(static_cast<int64_t>(pending.size()), [&](int64_t i, int) {
    const Record record = pending[static_cast<size_t>(i)]();
    ImageRow& row = rows[static_cast<size_t>(i)];
    const ImageConfig& mine = config.of_folder(record.folder);
    row.caption = applied(mine.captions, record.caption, 0, record.name), row.name = record.name;
    try {
      PreparedImage image = prepare_image(record, mine, {});
      check(!size || image.fit.size == *size, Code::io,
            "{}: its header gave a size for the bucket {}; it decodes to {}", record.name, size ? to_string(*size) : "",
            to_string(image.fit.size));
      if (config.sizes) image.arrays["mirrored_time_ids"] = mirrored_ids(image);
      row.arrays = std::move(image.arrays);
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      row.fault = e.message();
    }
  });
  LoadedImages out;
  std::vector<ImageRow> good;
  for (size_t i = 0; i < rows.size(); ++i) {
    ImageRow& row = rows[i];
    if (!row.fault.empty()) {
      log_warning("skipped {}", row.fault);
      out.skipped.push_back(row.fault);
      continue;
    }
    out.names.push_back(row.name);
    out.captions.push_back(row.caption);
    out.numbers.push_back(records[i]);
    good.push_back(std::move(row));
  }
  if (good.empty()) return out;
  HostArrays arrays = stack_rows(good);
  out.pixels = arrays["pixels"], out.mask = arrays["mask"];
  out.time_ids = arrays["time_ids"], out.mirrored_time_ids = arrays["mirrored_time_ids"];
  for (int64_t i = 0; i < config.references; ++i)
    out.references.push_back(arrays.at(fmt::format("reference_image_{}", i)));
  if (out.mask && config.random_flip) out.mirrored_mask = mirrored(out.mask);
  return out;
}

LoadedImages load_images(const std::shared_ptr<const RecordSource>& source, const ImageConfig& config) {
  const ImagesInBuckets all = sort_into_aspect_buckets(source, config);
  check(all.sizes.size() == 1, Code::internal, "images: {} sizes; expected one", all.sizes.size());
  LoadedImages out = load_images(*all.source, all.records[0], config);
  if (out.names.empty())
    fail(Code::io, "{}: none of {} images can be decoded; the first: {}", source->name(), all.records[0].size(),
         out.skipped.at(0));
  return out;
}

HostArray mirrored(const HostArray& images) {
  HostArray out(images.shape());
  const Shape& s = images.shape();
  const size_t pixel = static_cast<size_t>(s.dim(-1)) * size_of(s.dtype), row = static_cast<size_t>(s.dim(-2)) * pixel;
  const std::byte* from = images.data();
  std::byte* to = out.mutable_data();
  for (const std::byte* end = from + images.bytes(); from < end; from += row, to += row)
    for (size_t at = 0; at < row; at += pixel) std::copy_n(from + at, pixel, to + row - pixel - at);
  return out;
}

}  // namespace md
