#include "maxdiffusion/data/image_folder.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/sources.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char *kMetadata = "metadata.jsonl", *kMetadataCsv = "metadata.csv";

std::string lower_extension(const fs::path& p) {
  std::string e = p.extension().string();
  std::ranges::transform(e, e.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return e;
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
      if (p.filename() == kMetadata || p.filename() == kMetadataCsv) all.metadata.insert(p.string());
      check(p.filename() != "metadata.parquet", Code::io, "{}: captions are read from {}, {} or .txt files", p.string(),
            kMetadata, kMetadataCsv);
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

using Row = std::function<void(int64_t line, const nlohmann::json& row)>;

void each_json_line(const std::string& file, const std::string& text, const Row& f) {
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
    f(number, row);
  }
}

// Source of the form: RFC 4180. The first row names the columns.
void each_csv_row(const std::string& file, const std::string& text, const Row& f) {
  std::vector<std::string> names, cells;
  std::string cell;
  int64_t number = 1, row_number = 1;
  bool quoted = false;
  const auto end_row = [&] {
    cells.push_back(std::move(cell));
    cell.clear();
    if (cells.size() == 1 && cells[0].empty()) {
      // a blank line
    } else if (names.empty()) {
      names = cells;
      if (names[0].starts_with("\xef\xbb\xbf")) names[0].erase(0, 3);
    } else {
      check(cells.size() == names.size(), Code::io, "{}:{}: {} cells; the first line has {}", file, row_number,
            cells.size(), names.size());
      nlohmann::json row = nlohmann::json::object();
      for (size_t i = 0; i < names.size(); ++i) row[names[i]] = cells[i];
      f(row_number, row);
    }
    cells.clear();
    row_number = number;
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    number += c == '\n';
    if (quoted) {
      if (c != '"') {
        cell += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        cell += text[++i];
      } else {
        quoted = false;
      }
    } else if (c == '"' && cell.empty()) {
      quoted = true;
    } else if (c == ',') {
      cells.push_back(std::move(cell));
      cell.clear();
    } else if (c == '\n') {
      end_row();
    } else if (c != '\r') {
      cell += c;
    }
  }
  check(!quoted, Code::io, "{}:{}: a quoted cell does not end", file, row_number);
  if (!cell.empty() || !cells.empty()) end_row();
}

// Adds the rows of one metadata file: path of the picture → caption.
void read_metadata(const std::string& file, const ImageFolderConfig& config,
                   std::map<std::string, std::string>& captions) {
  std::map<std::string, int64_t> line_of;
  const auto add = [&](int64_t number, const nlohmann::json& row) {
    // Hugging Face's loader makes of the column file_name one that is called image.
    const bool renamed = config.image_column == "image" && !row.contains("image") && row.contains("file_name");
    const std::string image_column = renamed ? "file_name" : config.image_column;
    for (const std::string& column : {image_column, config.caption_column}) {
      check(row.contains(column), Code::io, "{}:{}: no column '{}'; the line has: {}", file, number, column,
            keys_of(row));
    }
    const auto& name = row[image_column];
    check(name.is_string(), Code::io, "{}:{}: '{}' must be a string", file, number, image_column);
    const auto caption = caption_of(row[config.caption_column]);
    check(caption.has_value(), Code::io, "{}:{}: '{}' must be a string", file, number, config.caption_column);
    const std::string picture = (fs::path(file).parent_path() / name.get<std::string>()).lexically_normal().string();
    std::error_code ec;
    check(fs::is_regular_file(picture, ec), Code::io, "{}:{}: names '{}', which does not exist", file, number, picture);
    const auto [before, fresh] = line_of.emplace(picture, number);
    check(fresh, Code::io, "{}:{}: names '{}' again, first on line {}", file, number, picture, before->second);
    captions[picture] = *caption;
  };
  const std::string text = read_file(file);
  file.ends_with(kMetadataCsv) ? each_csv_row(file, text, add) : each_json_line(file, text, add);
}

/// The path below `root`, without extension.
std::string stem_below(const std::string& root, const std::string& file) {
  return fs::path(file).lexically_relative(fs::path(root).lexically_normal()).replace_extension().string();
}

/// The masks of pictures, one each.
std::vector<std::string> find_masks(const std::string& folder, const std::string& root,
                                    const std::vector<ImageItem>& items) {
  check(fs::is_directory(folder), Code::io, "conditioning_data_dir '{}' is not a folder", folder);
  std::map<std::string, std::string> masks;
  for (const std::string& file : walk(fs::path(folder).lexically_normal().string()).pictures) {
    const auto [it, fresh] = masks.emplace(stem_below(folder, file), file);
    check(fresh, Code::io, "conditioning_data_dir: {} and {} are masks of the same picture", it->second, file);
  }
  std::vector<std::string> found, missing;
  for (const ImageItem& item : items) {
    const auto it = masks.find(stem_below(root, item.file));
    if (it == masks.end())
      missing.push_back(item.file);
    else
      found.push_back(it->second);
  }
  check(missing.empty(), Code::io, "conditioning_data_dir '{}': {} of {} pictures have no mask there, the first is {}",
        folder, missing.size(), items.size(), missing.empty() ? "" : missing[0]);
  return found;
}

class ImageFolder : public RecordSource {
 public:
  ImageFolder(const std::string& folder, const DataSourceConfig& config)
      : RecordSource(fmt::format("image folder '{}'", folder),
                     fingerprint_of(list_inputs(folder)) + columns_key(config)),
        items_(list_image_folder(folder, {config.image_column, config.caption_column, config.max_train_samples})) {
    if (!config.mask_folder.empty()) masks_ = find_masks(config.mask_folder, folder, items_);
  }
  int64_t size() const override { return static_cast<int64_t>(items_.size()); }
  bool masks() const override { return !masks_.empty(); }
  Record read(int64_t index) const override {
    const ImageItem& item = items_[static_cast<size_t>(index)];
    Record r{.name = item.file, .caption = item.caption};
    try {
      const auto file = open_input(item.file);
      r.picture = file->read(0, file->size());
      if (!masks_.empty()) {
        const auto mask = open_input(masks_[static_cast<size_t>(index)]);
        r.mask = mask->read(0, mask->size());
      }
    } catch (const Error& e) {
      r.fault = e.message();
    }
    return r;
  }

 private:
  std::vector<ImageItem> items_;
  std::vector<std::string> masks_;  // of each; empty: none are asked for
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

SourcePtr image_folder_source(const std::string& folder, const DataSourceConfig& config) {
  check(config.array_columns.empty(), Code::invalid_config,
        "image folder '{}' holds pictures and captions; cached arrays are read from tfrecord, grain and hf", folder);
  if (!fs::is_directory(folder)) list_image_folder(folder, {});  // says why
  return std::make_shared<ImageFolder>(folder, config);
}

}  // namespace md
