#include "maxdiffusion/commands/check_data.h"

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/folders/data_folders.h"
#include "maxdiffusion/data/images/inspect_images.h"
#include "maxdiffusion/data/records/shuffle.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/run/folder_samples.h"

namespace md {
namespace {

constexpr double kMuch = 2;  // enlargement above which an image is reported as tiny

/// Warns with the number of names and the first five of them.
void warn_of(const std::string& what, const std::vector<std::string>& names) {
  constexpr size_t kNamed = 5;
  if (names.empty()) return;
  std::string list;
  for (size_t i = 0; i < std::min(kNamed, names.size()); ++i) list += "\n  " + names[i];
  if (names.size() > kNamed) list += fmt::format("\n  and {} more", names.size() - kNamed);
  log_warning("{}: {}{}", what, names.size(), list);
}

/// Writes evenly spaced samples of all buckets as one image.
void write_contact_sheet(const std::string& file, const ImagesInBuckets& sorted, const ImageConfig& images,
                         uint64_t seed) {
  constexpr int64_t kSide = 160, kMost = 48, kColumns = 8;
  std::vector<int64_t> all;
  for (const auto& records : sorted.records) all.insert(all.end(), records.begin(), records.end());
  const int64_t n = std::min<int64_t>(kMost, std::ssize(all));
  std::vector<GridCell> cells(static_cast<size_t>(n));
  parallel_for(n, [&](int64_t i, int) {
    const Record r = sorted.source->find({all[static_cast<size_t>(i * std::ssize(all) / n)]})[0]();
    const ImageConfig& config = images.of_folder(r.folder);
    const uint64_t bits = bits_of_sample(seed, 0, i);
    GridCell& cell = cells[static_cast<size_t>(i)];
    try {
      cell.rgb = seen_by_model(r, config, bits, kSide);
      cell.caption = caption_of(r, config, bits);
      if (cell.caption.empty()) cell.caption = "(no caption)";
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;  // reported elsewhere
    }
  });
  std::erase_if(cells, [](const GridCell& cell) { return !cell.rgb; });
  if (!cells.empty()) write_png(file, make_grid(cells, std::min<int64_t>(kColumns, std::ssize(cells))));
}

}  // namespace

void check_images(const std::shared_ptr<const RecordSource>& source, const ImageConfig& images, uint64_t seed,
                  const std::string& folder) {
  ImagesInBuckets sorted = sort_into_aspect_buckets(source, images);
  if (const auto folders = std::dynamic_pointer_cast<const DataFolders>(source))
    sorted = repeated(std::move(sorted), *folders);
  std::vector<int64_t> all, samples;
  for (const auto& records : sorted.records) {
    all.insert(all.end(), records.begin(), records.end());
    samples.push_back(std::ssize(records));
  }
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  std::vector<ImageFindings> found(all.size());
  std::vector<std::string> empty(all.size());
  parallel_for(std::ssize(all), [&](int64_t i, int) {
    const auto k = static_cast<size_t>(i);
    const Record r = sorted.source->find({all[k]})[0]();
    const ImageConfig& config = images.of_folder(r.folder);
    found[k] = inspect_image(r, config);
    if (applied(config.captions, r.caption, 0, r.name).empty()) empty[k] = r.name;
  });
  std::erase(empty, "");
  std::vector<std::string> damaged, small, turned, duplicates;
  for (const ImageFindings& f : found) {
    if (!f.fault.empty()) damaged.push_back(f.fault);
    if (f.fault.empty() && f.enlarged > kMuch)
      small.push_back(fmt::format("{} of {} pixels, enlarged {:.1f} times", f.name, to_string(f.size), f.enlarged));
    if (f.turned) turned.push_back(f.name);
  }
  for (const auto& [first, second] : duplicate_images(found))
    duplicates.push_back(fmt::format("{} and {}", found[first].name, found[second].name));
  warn_of("images that do not decode", damaged);
  warn_of("tiny images", small);
  warn_of("images that EXIF turns, as they are trained; see that they stand upright", turned);
  warn_of("images that look the same", duplicates);
  warn_of("images without caption", empty);
  for (size_t i = 0; i < sorted.sizes.size(); ++i)
    log_info("size {}: {}", to_string(sorted.sizes[i]), counted(samples[i], "sample"));
  log_info("{}: {} found, {} damaged, {} tiny, {} turned, {} duplicates, {} without caption, {} left out",
           source->name(), counted(std::ssize(found), "image"), damaged.size(), small.size(), turned.size(),
           duplicates.size(), empty.size(), sorted.skipped);
  if (folder.empty()) {
    log_info("try: check_dir=FOLDER for a chart of sizes and a sheet of what the model sees");
    return;
  }
  make_folders(folder);
  write_png(folder + "/buckets.png", bucket_chart(sorted.sizes, samples));
  write_contact_sheet(folder + "/contact_sheet.png", sorted, images, seed);
  log_info("wrote {0}/buckets.png, {0}/contact_sheet.png", folder);
}

}  // namespace md
