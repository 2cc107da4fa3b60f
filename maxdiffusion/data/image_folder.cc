#include "maxdiffusion/data/image_folder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/parallel.h"
#include "maxdiffusion/data/resize.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetadata = "metadata.jsonl";

std::string lower_extension(const fs::path& p) {
  std::string e = p.extension().string();
  std::ranges::transform(e, e.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return e;
}

std::string trimmed(const std::string& s) {
  const size_t a = s.find_first_not_of(" \t\r\n");
  return a == std::string::npos ? "" : s.substr(a, s.find_last_not_of(" \t\r\n") - a + 1);
}

// What lies in a folder, before anything is read.
struct Listing {
  std::set<std::string> pictures, texts, metadata;  // sorted paths
};

Listing walk(const std::string& folder) {
  std::error_code ec;
  const bool found = fs::is_directory(folder, ec);
  if (!found) {
    throw Error(Code::io, fmt::format("image folder '{}': {}", folder,
                                      fs::exists(folder, ec) ? "not a folder" : "no such folder"))
        .note("try: train_data_dir names a folder of pictures, with metadata.jsonl or .txt captions");
  }
  Listing all;
  fs::recursive_directory_iterator it(folder, fs::directory_options::follow_directory_symlink, ec), end;
  check(!ec, Code::io, "image folder '{}': {}", folder, ec.message());
  while (it != end) {
    const fs::path& p = it->path();
    if (p.filename().string().starts_with('.')) {
      it.disable_recursion_pending();
    } else if (it->is_regular_file(ec)) {
      const std::string e = lower_extension(p);
      if (p.filename() == kMetadata) all.metadata.insert(p.string());
      if (e == ".png" || e == ".jpg" || e == ".jpeg" || e == ".webp") all.pictures.insert(p.string());
      if (e == ".txt") all.texts.insert(p.string());
    }
    it.increment(ec);
    check(!ec, Code::io, "image folder '{}': {}", folder, ec.message());
  }
  return all;
}

// A caption cell: text, null, or a list of which the first counts.
std::optional<std::string> caption_of(const nlohmann::json& cell) {
  if (cell.is_string()) return cell.get<std::string>();
  if (cell.is_null()) return "";
  if (cell.is_array() && !cell.empty() && cell[0].is_string()) return cell[0].get<std::string>();
  return std::nullopt;
}

std::string keys_of(const nlohmann::json& row) {
  std::string keys;
  for (const auto& [key, value] : row.items()) keys += (keys.empty() ? "" : ", ") + key;
  return keys.empty() ? "none" : keys;
}

// Adds the rows of one metadata file: path of the picture → caption.
void read_metadata(const std::string& file, const ImageFolderConfig& config,
                   std::map<std::string, std::string>& captions) {
  std::map<std::string, int64_t> line_of;
  const std::string text = read_file(file);
  int64_t number = 0;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string line = trimmed(text.substr(start, end - start));
    start = end + 1;
    ++number;
    if (line.empty()) continue;
    const auto row = nlohmann::json::parse(line, nullptr, false);
    check(row.is_object(), Code::io, "{}:{}: expected a JSON object per line, found '{}'", file, number,
          line.substr(0, 60));
    for (const std::string& column : {config.image_column, config.caption_column}) {
      check(row.contains(column), Code::io, "{}:{}: no column '{}'; the line has: {}", file, number, column,
            keys_of(row));
    }
    const auto& name = row[config.image_column];
    check(name.is_string(), Code::io, "{}:{}: '{}' must be a string", file, number, config.image_column);
    const auto caption = caption_of(row[config.caption_column]);
    check(caption.has_value(), Code::io, "{}:{}: '{}' must be a string", file, number, config.caption_column);
    const std::string picture = (fs::path(file).parent_path() / name.get<std::string>()).lexically_normal().string();
    std::error_code ec;
    check(fs::is_regular_file(picture, ec), Code::io, "{}:{}: names '{}', which does not exist", file, number, picture);
    const auto [before, fresh] = line_of.emplace(picture, number);
    check(fresh, Code::io, "{}:{}: names '{}' again, first on line {}", file, number, picture, before->second);
    captions[picture] = *caption;
  }
}

// Reports "n of m" at most every five seconds, from any thread.
class Progress {
 public:
  explicit Progress(int64_t total) : total_(total) {}
  void step() {
    const int64_t done = ++done_;
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(5)) return;
    last_ = now;
    log_info("read {} of {} pictures", done, total_);
  }

 private:
  const int64_t total_;
  std::atomic<int64_t> done_ = 0;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace

std::vector<ImageItem> list_image_folder(const std::string& folder, const ImageFolderConfig& config) {
  const std::string root = fs::path(folder).lexically_normal().string();
  Listing found = walk(root);
  std::map<std::string, std::string> captions;
  for (const std::string& file : found.metadata) read_metadata(file, config, captions);
  for (const auto& [picture, caption] : captions) found.pictures.insert(picture);
  if (found.pictures.empty()) {
    Error error(Code::io, fmt::format("image folder '{}': no pictures (png, jpeg, webp)", folder));
    if (!found.texts.empty())
      error.note(
          fmt::format("captions without pictures: {} and {} more", *found.texts.begin(), found.texts.size() - 1));
    if (!found.metadata.empty()) error.note(fmt::format("{} names no pictures", *found.metadata.begin()));
    throw error.note("try: train_data_dir names the folder that holds the pictures");
  }
  std::vector<ImageItem> items;
  int64_t bare = 0;
  for (const std::string& picture : found.pictures) {
    std::string text = fs::path(picture).replace_extension(".txt").string();
    const bool beside = found.texts.erase(text) > 0;
    if (config.max_train_samples >= 0 && static_cast<int64_t>(items.size()) >= config.max_train_samples) continue;
    auto named = captions.find(picture);
    std::string caption = named != captions.end() ? named->second : beside ? trimmed(read_file(text)) : "";
    bare += named == captions.end() && !beside;
    items.push_back({picture, std::move(caption)});
  }
  if (bare > 0) {
    log_warning("image folder '{}': {} of {} pictures have no caption ({} or .txt): they train with an empty one",
                folder, bare, items.size(), kMetadata);
  }
  if (!found.texts.empty() && captions.empty() && bare < static_cast<int64_t>(items.size())) {
    log_warning("image folder '{}': {} .txt files have no picture beside them, the first is {}", folder,
                found.texts.size(), *found.texts.begin());
  }
  check(!items.empty(), Code::invalid_config, "max_train_samples: 0 leaves no picture of '{}'", folder);
  return items;
}

HostArray fit_image(const HostArray& rgb, const ImageFolderConfig& config, bool flip) {
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1], r = config.resolution;
  HostArray out = rgb;
  if (config.center_crop) {
    // torchvision: the long side is cut to a whole number, the offset rounded half to even.
    const int64_t th = h <= w ? r : r * h / w, tw = h <= w ? r * w / h : r;
    const auto offset = [&](int64_t size) {
      return static_cast<int64_t>(std::nearbyint(static_cast<double>(size - r) / 2.0));
    };
    out = crop_rgb8(resize_rgb8(rgb, th, tw), offset(th), offset(tw), r, r);
  } else {
    out = resize_rgb8(rgb, r, r);
  }
  return flip ? flip_rgb8(out) : out;
}

HostArray prepare_image(const HostArray& rgb, const ImageFolderConfig& config, bool flip) {
  const HostArray fitted = fit_image(rgb, config, flip);
  HostArray out(Shape{DType::f32, fitted.dims()});
  std::ranges::transform(fitted.view<uint8_t>(), out.mutable_view<float>().begin(),
                         [](uint8_t v) { return static_cast<float>(v) / 127.5f - 1.0f; });
  return out;
}

LoadedFolder load_image_folder(const std::string& folder, const ImageFolderConfig& config) {
  check(config.resolution > 0, Code::invalid_config, "resolution: {}; expected > 0", config.resolution);
  const std::vector<ImageItem> items = list_image_folder(folder, config);
  const int64_t n = static_cast<int64_t>(items.size()), r = config.resolution;
  HostArray pixels(Shape{DType::u8, {n, r, r, 3}});
  std::byte* const to = pixels.mutable_data();
  const size_t bytes = static_cast<size_t>(r * r * 3);
  std::vector<std::string> hashes(items.size()), reasons(items.size());
  Progress progress(n);
  parallel_for(n, [&](int64_t i, int) {
    const auto k = static_cast<size_t>(i);
    try {
      const MappedFile file = map_file(items[k].file);
      const HostArray fitted = fit_image(decode_image_bytes(file.data, file.size, items[k].file), config, false);
      std::copy_n(fitted.data(), bytes, to + k * bytes);
      hashes[k] = content_hash({reinterpret_cast<const char*>(file.data), file.size});
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      reasons[k] = e.message();
    }
    progress.step();
  });

  LoadedFolder out;
  std::string content = fmt::format("image folder 1 {} {} {}\n", r, config.center_crop, config.random_flip);
  for (size_t i = 0; i < items.size(); ++i) {
    if (hashes[i].empty()) {
      log_warning("skipped {}", reasons[i]);
      out.skipped.push_back(reasons[i]);
      continue;
    }
    const size_t k = out.files.size();
    if (k != i) std::copy_n(to + i * bytes, bytes, to + k * bytes);
    content += fmt::format("{} {}:{}\n", hashes[i], items[i].caption.size(), items[i].caption);
    out.files.push_back(items[i].file);
    out.captions.push_back(items[i].caption);
  }
  if (!out.skipped.empty()) {
    check(!out.files.empty(), Code::io, "image folder '{}': none of {} pictures decodes; the first: {}", folder, n,
          out.skipped[0]);
    log_warning("image folder '{}': {} of {} pictures do not decode and were skipped", folder, out.skipped.size(), n);
  }
  out.pixels =
      HostArray(Shape{DType::u8, {static_cast<int64_t>(out.files.size()), r, r, 3}}, pixels.owner(), pixels.data());
  out.fingerprint = content_hash(content);
  return out;
}

}  // namespace md
