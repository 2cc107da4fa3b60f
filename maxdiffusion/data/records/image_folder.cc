#include "maxdiffusion/data/records/image_folder.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/lower_case.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/data/records/file_hashes.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/missing_captions.h"
#include "maxdiffusion/storage/links.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char *kMetadata = "metadata.jsonl", *kMetadataCsv = "metadata.csv";

std::string lower_extension(const fs::path& p) { return lower_case(p.extension().string()); }

/// A kind of folder, and its words for messages.
struct Content {
  const char *folder, *items, *formats;
  std::set<std::string> extensions;
  bool clips = false;  // folders of frames are also items
};
const Content kImages{
    "image folder",
    "images",
    "png, jpeg, webp, gif, bmp, tiff, avif",
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".avif"}};
const Content kClips{"clip folder",
                     "clips",
                     "mp4, mov, mkv, webm, avi, gif, animated webp, or folders of png or jpeg frames",
                     {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".webp"},
                     true};
bool is_frame(const std::string& extension) {
  return extension == ".png" || extension == ".jpg" || extension == ".jpeg";
}

/// Compares names; numbers in them by value: "frame 9" comes before "frame 10".
bool in_name_order(const std::string& a, const std::string& b) {
  const auto digits = [](const std::string& s, size_t i) {
    return std::min(s.find_first_not_of("0123456789", i), s.size()) - i;
  };
  for (size_t i = 0, k = 0; i < a.size() && k < b.size();) {
    const size_t n = digits(a, i), m = digits(b, k);
    if (n == 0 || m == 0) {
      if (a[i] != b[k]) return a[i] < b[k];
      ++i, ++k;
      continue;
    }
    const auto value = [](const std::string& s, size_t at, size_t size) {
      const size_t from = std::min(s.find_first_not_of('0', at), at + size);
      return s.substr(from, at + size - from);
    };
    const std::string x = value(a, i, n), y = value(b, k, m);
    if (x != y) return x.size() != y.size() ? x.size() < y.size() : x < y;
    i += n, k += m;
  }
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

// The files of a folder before any is read: names relative to it, sorted.
struct Listing {
  const Content* content;
  std::string root;
  std::map<std::string, FoundFile> files;
  std::set<std::string> items, texts, metadata;
  std::map<std::string, std::string> texts_of;             // "0001.txt" → "0001.TXT"
  std::map<std::string, std::vector<std::string>> frames;  // frames of each folder that is a clip

  std::string location(const std::string& name) const {
    if (is_remote(root)) return below(root, name);
    return (fs::path(root) / name).lexically_normal().string();
  }
  FoundFile file(const std::string& name) const {
    const auto found = files.find(name);
    return found != files.end() ? found->second : FoundFile{location(name), -1};
  }
};

std::string text_of(const FoundFile& f) {
  const auto file = open_input(f);
  return decoded_text(file->read(0, file->size()).bytes, shown(f.location));
}

/// A normalized path below a folder, without dots; empty if it leads outside.
std::string path_inside(const fs::path& path) {
  std::string name = path.lexically_normal().string();
  if (name.ends_with('/')) name.pop_back();
  const bool out = fs::path(name).is_absolute() || name == ".." || name.starts_with("../") || name == ".";
  return out ? "" : name;
}

/// Warns of files that are not read.
void warn_of_skipped(const std::string& what, const SkippedLinks& links, const std::map<std::string, int64_t>& others) {
  const bool out =
      std::ranges::any_of(links, [](const auto& link) { return link.second.starts_with("it leads to '"); });
  if (!links.empty())
    log_warning("{}: {} not followed; the first is {}: {}{}", what,
                links.size() == 1 ? "1 link is" : fmt::format("{} links are", links.size()), links.begin()->first,
                links.begin()->second, out ? "; try: follow_links=true, which follows links out of the folder" : "");
  std::string kinds;
  int64_t files = 0;
  for (const auto& [extension, count] : others) {
    kinds += fmt::format("{}{} {}", kinds.empty() ? "" : ", ", count, extension);
    files += count;
  }
  if (files > 0)
    log_warning("{}: {} ignored: {}", what,
                files == 1 ? "1 file of another kind is" : fmt::format("{} files of other kinds are", files), kinds);
}

/// `what`: description, and `hint`: what to try, if the folder is missing; for messages.
Listing listing_of(const std::string& folder, const Content& content, const char* what = nullptr,
                   const char* hint = nullptr, const ImageFolderConfig& config = {}) {
  Listing all{.content = &content, .root = is_remote(folder) ? folder : fs::path(folder).lexically_normal().string()};
  std::error_code ec;
  const bool is_folder = is_remote(folder) || fs::is_directory(folder, ec);
  SkippedLinks links;
  std::map<std::string, int64_t> others;  // by extension
  const std::vector<FoundFile> found =
      is_folder ? list_files(all.root, links, config.follow_links) : std::vector<FoundFile>();
  if (const auto n = std::erase_if(links, [](const auto& l) { return l.second == kNoRegularFile; }); n > 0)
    others[kNoRegularFile] = static_cast<int64_t>(n);
  const std::string before = split_location(below(all.root, "")).path;
  if (!is_folder || (!found.empty() && !found[0].location.starts_with(before))) {
    throw Error(Code::io, fmt::format("{} '{}': {}", what ? what : content.folder, shown(folder),
                                      is_folder || fs::exists(folder, ec) ? "not a folder" : "no such folder"))
        .note(hint ? hint : fmt::format("try: train_data_dir names a folder of {} with captions", content.items));
  }
  for (const FoundFile& f : found) {
    const fs::path p = split_location(f.location).path.substr(before.size());
    const std::string e = lower_extension(p);
    const bool of_clip = content.clips && is_frame(e) && !p.parent_path().has_parent_path();
    if (!config.recursive && p.has_parent_path() && !of_clip) continue;
    all.files[p.string()] = f;
    if (p.filename() == kMetadata || p.filename() == kMetadataCsv) all.metadata.insert(p.string());
    check(p.filename() != "metadata.parquet", Code::io, "{}: captions are read from {}, {} or .txt files",
          shown(f.location), kMetadata, kMetadataCsv);
    if (content.extensions.contains(e)) all.items.insert(p.string());
    if (content.clips && is_frame(e)) all.frames[p.parent_path().string()].push_back(p.string());
    bool is_text = false;
    for (const std::string& ending : config.caption_extensions) {
      const std::string text = p.string();
      if (text.size() < ending.size() || lower_case(text.substr(text.size() - ending.size())) != lower_case(ending))
        continue;
      is_text = true;
      all.texts.insert(text);
      if (!text.ends_with(ending)) all.texts_of[text.substr(0, text.size() - ending.size()) + ending] = text;
    }
    const bool known = content.extensions.contains(e) || (content.clips && is_frame(e)) || is_text ||
                       all.metadata.contains(p.string());
    if (!known && !config.quiet) ++others[e.empty() ? "without extension" : e];
  }
  warn_of_skipped(fmt::format("{} '{}'", content.folder, shown(folder)), links, others);
  // Images next to videos, or in the folder itself, are not clips.
  std::set<std::string> of_videos{""};
  for (const std::string& video : all.items) of_videos.insert(fs::path(video).parent_path().string());
  std::erase_if(all.frames, [&](const auto& clip) { return of_videos.contains(clip.first); });
  for (auto& [clip, frames] : all.frames) {
    std::ranges::sort(frames, in_name_order);
    all.items.insert(clip);
  }
  return all;
}

// A caption cell: a text, null, or a list whose first entry is used.
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
    const auto row = parse_json_or_discard(line);
    check(row.is_object(), Code::io, "{}:{}: expected a JSON object per line, found '{}'", file, number,
          line.substr(0, 60));
    f(number, row);
  }
}

// Format: RFC 4180. The first row names the columns.
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

/// Metadata of an item.
struct Named {
  std::string caption;
  std::vector<std::string> references;
  std::optional<CropBox> box;
};

/// "crop_box": [left, top, width, height].
std::optional<CropBox> box_of(const nlohmann::json& row, const std::string& where) {
  if (!row.contains("crop_box") || row["crop_box"].is_null()) return {};
  const auto& cell = row["crop_box"];
  bool right = cell.is_array() && cell.size() == 4;
  for (size_t i = 0; right && i < 4; ++i)
    right = cell[i].is_number_integer() && cell[i].get<int64_t>() >= (i < 2 ? 0 : 1);
  check(right, Code::io, "{}: crop_box is {}; expected [left, top, width, height] in pixels", where, cell.dump());
  return CropBox{cell[0], cell[1], cell[2], cell[3]};
}

// Adds the rows of one metadata file, by name of the image.
void read_metadata(const Listing& all, const std::string& name, const ImageFolderConfig& config,
                   std::map<std::string, Named>& rows) {
  const std::string file = shown(all.location(name));
  std::map<std::string, int64_t> line_of;
  const auto add = [&](int64_t number, const nlohmann::json& row) {
    // Hugging Face's loader names the column file_name "image".
    const bool usual =
        config.image_column == (all.content->clips ? "video" : "image") || config.image_column == "image";
    const bool renamed = usual && !row.contains(config.image_column) && row.contains("file_name");
    const std::string image_column = renamed ? "file_name" : config.image_column;
    std::vector<std::string> columns = {image_column, config.caption_column};
    columns.insert(columns.end(), config.reference_columns.begin(), config.reference_columns.end());
    for (const std::string& column : columns) {
      check(row.contains(column), Code::io, "{}:{}: no column '{}'; the line has: {}", file, number, column,
            keys_of(row));
    }
    const auto file_of = [&](const std::string& column, const nlohmann::json& cell) {
      check(cell.is_string(), Code::io, "{}:{}: '{}' must be a string", file, number, column);
      std::string item = path_inside(fs::path(name).parent_path() / cell.template get<std::string>());
      check(!item.empty(), Code::io, "{}:{}: names '{}', which is not inside of '{}'", file, number,
            cell.template get<std::string>(), shown(all.root));
      // Files whose names start with a dot are not listed, but metadata may name them.
      std::error_code ec;
      const bool there = all.items.contains(item) || all.files.contains(item) ||
                         (!is_remote(all.root) && fs::is_regular_file(fs::symlink_status(all.location(item), ec)));
      check(there, Code::io, "{}:{}: names '{}', which does not exist", file, number, shown(all.location(item)));
      return item;
    };
    const std::string item = file_of(image_column, row[image_column]);
    const auto caption = caption_of(row[config.caption_column]);
    check(caption.has_value(), Code::io, "{}:{}: '{}' must be a string", file, number, config.caption_column);
    const auto [before, fresh] = line_of.emplace(item, number);
    check(fresh, Code::io, "{}:{}: names '{}' again, first on line {}", file, number, shown(all.location(item)),
          before->second);
    rows[item] = {*caption, {}, box_of(row, fmt::format("{}:{}", file, number))};
    // A list has an image for each time that its column is named.
    std::map<std::string, size_t> taken;
    for (const std::string& column : config.reference_columns) {
      const nlohmann::json& cell = row[column];
      const auto times = static_cast<size_t>(std::ranges::count(config.reference_columns, column));
      check(!cell.is_array() || cell.size() == times, Code::io,
            "{}:{}: '{}' lists {} images; cond_image_column names it {} times: expected as many in every line", file,
            number, column, cell.size(), times);
      rows[item].references.push_back(file_of(column, cell.is_array() ? cell[taken[column]++] : cell));
    }
  };
  const std::string text = text_of(all.file(name));
  name.ends_with(kMetadataCsv) ? each_csv_row(file, text, add) : each_json_line(file, text, add);
}

std::vector<ImageItem> items_of(const std::string& folder, Listing found, const ImageFolderConfig& config) {
  const auto place = [&](const std::string& name) { return shown(found.location(name)); };
  std::map<std::string, Named> captions;
  for (const std::string& file : found.metadata) read_metadata(found, file, config, captions);
  for (const auto& [item, row] : captions)
    for (const std::string& reference : row.references) found.items.erase(reference);
  const bool usual = config.image_column == "image" || config.image_column == "video" ||
                     config.image_column == ImageFolderConfig().image_column;
  for (const auto& [key, renamed] :
       {std::pair{"image_column", !usual}, {"caption_column", config.caption_column != "text"}})
    if (found.metadata.empty() && renamed)
      log_warning("{} is ignored: there is no {}, captions are in .txt files", key, kMetadata);
  const auto& [what, things, formats, extensions, clips] = *found.content;
  for (const auto& [item, row] : captions) found.items.insert(item);
  if (found.items.empty()) {
    Error error(Code::io, fmt::format("{} '{}': no {} ({})", what, shown(folder), things, formats));
    if (!found.texts.empty())
      error.note(fmt::format("captions without {}: {} and {} more", things, place(*found.texts.begin()),
                             found.texts.size() - 1));
    if (!found.metadata.empty()) error.note(fmt::format("{} names no {}", place(*found.metadata.begin()), things));
    throw error.note(fmt::format("try: train_data_dir names the folder that holds the {}", things));
  }
  std::vector<ImageItem> items;
  std::vector<std::string> texts;  // caption files of the items; "": none, or not read
  std::set<std::string> used;
  for (const std::string& item : found.items) {
    const auto frames = found.frames.find(item);
    std::string text;
    for (const std::string& ending : config.caption_extensions) {
      std::string name =
          frames != found.frames.end() ? item + ending : fs::path(item).replace_extension(ending).string();
      if (const auto other = found.texts_of.find(name); !found.texts.contains(name) && other != found.texts_of.end())
        name = other->second;
      if (!found.texts.contains(name)) continue;
      used.insert(name);  // of each item that has this name before its extension
      if (text.empty()) text = name;
    }
    const bool has_text_file = !text.empty();
    if (config.max_train_samples >= 0 && static_cast<int64_t>(items.size()) >= config.max_train_samples) continue;
    const auto named = captions.find(item);
    const FoundFile file = found.file(item);
    items.push_back({.file = file.location,
                     .name = item,
                     .caption = named != captions.end() ? named->second.caption : "",
                     .size = file.size,
                     .modified = file.modified,
                     .captioned = has_text_file || named != captions.end()});
    check(config.reference_columns.empty() || named != captions.end(), Code::io,
          "cond_image_column: '{}' has no reference image; expected a line of {} that names it", place(item),
          kMetadata);
    if (named != captions.end()) items.back().box = named->second.box;
    if (named != captions.end())
      for (const std::string& reference : named->second.references)
        items.back().references.push_back(found.file(reference));
    if (frames != found.frames.end())
      for (const std::string& frame : frames->second) items.back().frames.push_back(found.file(frame));
    texts.push_back(named == captions.end() && has_text_file ? text : "");
  }
  for (const std::string& name : used) found.texts.erase(name);
  parallel_for(static_cast<int64_t>(items.size()), [&](int64_t i, int) {
    const auto k = static_cast<size_t>(i);
    if (!texts[k].empty()) items[k].caption = trimmed(text_of(found.file(texts[k])));
  });
  const auto bare = std::ranges::count(items, "", &ImageItem::caption);
  if (!config.quiet && config.captions)
    warn_of_missing({.where = fmt::format("{} '{}'", what, shown(folder)),
                     .things = things,
                     .missing = bare,
                     .all = std::ssize(items),
                     .expected = fmt::format("{} or .txt", kMetadata)});
  if (!found.texts.empty() && captions.empty() && !config.quiet && bare < static_cast<int64_t>(items.size())) {
    log_warning("{} '{}': {} .txt files have no {} next to them, the first is {}", what, shown(folder),
                found.texts.size(), clips ? "clip" : "image", place(*found.texts.begin()));
  }
  check(!items.empty(), Code::invalid_config,
        "max_train_samples is 0; expected -1 or more than 0: none of the {} of '{}' would be left", things,
        shown(folder));
  return items;
}

/// The mask (`kind`) of each image: the file with the same path in this folder, which `key` names, with any extension.
std::vector<FoundFile> find_partners(const Listing& listing, const std::vector<ImageItem>& items,
                                     const std::string& key, const std::string& kind) {
  const auto stem = [](const std::string& name) { return fs::path(name).replace_extension().string(); };
  std::map<std::string, FoundFile> partners;
  for (const std::string& name : listing.items) {
    const auto [it, fresh] = partners.emplace(stem(name), listing.file(name));
    check(fresh, Code::io, "{}: {} and {} are {}s of the same image", key, shown(it->second.location),
          shown(listing.location(name)), kind);
  }
  std::vector<FoundFile> found;
  std::vector<std::string> missing;
  for (const ImageItem& item : items) {
    if (const auto it = partners.find(stem(item.name)); it != partners.end())
      found.push_back(it->second);
    else
      missing.push_back(shown(item.file));
  }
  check(missing.empty(), Code::io, "{} '{}': {} of {} images have no {} there, the first is {}", key,
        shown(listing.root), missing.size(), items.size(), kind, missing.empty() ? "" : missing[0]);
  return found;
}

class ImageFolder : public RecordSource {
 public:
  ImageFolder(const std::string& folder, Listing found, const std::optional<Listing>& masks,
              const DataSourceConfig& config)
      : RecordSource(fmt::format("{} '{}'", found.content->folder, shown(folder)),
                     fingerprint_of(found) + (masks ? fingerprint_of(*masks) : "") + columns_key(config)),
        items_(items_of(folder, std::move(found),
                        {.image_column = config.image_column,
                         .caption_column = config.caption_column,
                         .max_train_samples = config.max_train_samples,
                         .reference_columns = config.reference_columns(),
                         .captions = config.captions})) {
    std::string names, captions;
    for (const ImageItem& item : items_) {
      names += item.name + "\n";
      captions += item.caption + "\n";
    }
    set_identity({.names = content_hash(names), .captions = content_hash(captions)});
    if (masks) masks_ = find_partners(*masks, items_, "conditioning_data_dir", "mask");
  }
  int64_t size() const override { return static_cast<int64_t>(items_.size()); }
  bool masks() const override { return !masks_.empty(); }
  bool captions_are_counted() const override { return true; }
  Record read(int64_t index) const override {
    const auto i = static_cast<size_t>(index);
    return read_item(items_[i], masks_.empty() ? nullptr : &masks_[i]);
  }
  RecordContent content(int64_t index, FileHashes& hashes) const override {
    const auto i = static_cast<size_t>(index);
    return content_of(items_[i], masks_.empty() ? nullptr : &masks_[i], hashes);
  }

 private:
  static std::string fingerprint_of(const Listing& found) {
    std::vector<FoundFile> files;
    for (const auto& [name, file] : found.files) files.push_back(file);
    return md::fingerprint_of(files);
  }
  std::vector<ImageItem> items_;
  std::vector<FoundFile> masks_;  // of each item; empty: no masks are requested
};

}  // namespace

std::vector<ImageItem> list_image_folder(const std::string& folder, const ImageFolderConfig& config) {
  return items_of(folder, listing_of(folder, config.clips ? kClips : kImages, nullptr, nullptr, config), config);
}

std::vector<FoundFile> list_frames(const std::string& folder) {
  std::vector<FoundFile> frames;
  for (const FoundFile& f : list_files(folder)) {
    const fs::path path = f.location;
    if (is_frame(lower_extension(path)) && fs::equivalent(path.parent_path(), folder)) frames.push_back(f);
  }
  std::ranges::sort(frames, in_name_order, &FoundFile::location);
  return frames;
}

std::vector<FoundFile> list_partners(const std::string& folder, const std::vector<ImageItem>& items,
                                     const std::string& key, const std::string& kind, bool follow_links) {
  const std::string advice = fmt::format("try: a folder of {}s, each with its image's path and name", kind);
  return find_partners(listing_of(folder, kImages, key.c_str(), advice.c_str(), {.follow_links = follow_links}), items,
                       key, kind);
}

Record read_item(const ImageItem& item, const FoundFile* mask) {
  Record r{.name = shown(item.file), .box = item.box, .caption = item.caption};
  try {
    const auto stored = [](const FoundFile& f) {
      const auto file = open_input(f);
      return file->read(0, file->size());
    };
    if (item.frames.empty()) r.image = stored({item.file, item.size});
    for (const FoundFile& frame : item.frames) r.frames.push_back(stored(frame));
    for (const FoundFile& reference : item.references) r.references.push_back(stored(reference));
    if (mask) r.mask = stored(*mask);
  } catch (const Error& e) {
    r.fault = e.message();
  }
  return r;
}

RecordContent content_of(const ImageItem& item, const FoundFile* mask, FileHashes& hashes) {
  RecordContent out{.name = shown(item.file), .caption = item.caption};
  try {
    std::vector<std::string> images, references;
    if (item.frames.empty()) images.push_back(hashes.of({item.file, item.size, item.modified}));
    for (const FoundFile& frame : item.frames) images.push_back(hashes.of(frame));
    for (const FoundFile& reference : item.references) references.push_back(hashes.of(reference));
    out.media = media_hash(images, references, mask ? hashes.of(*mask) : "", item.box);
  } catch (const Error& e) {
    out.fault = e.message();
  }
  return out;
}

SourcePtr image_folder_source(const std::string& folder, const DataSourceConfig& config) {
  check(config.array_columns.empty(), Code::invalid_config,
        "image folder '{}': it holds images and captions; encoded samples are read from dataset_type tfrecord, grain "
        "or hf",
        shown(folder));
  std::optional<Listing> masks;
  if (!config.conditioning_data_dir.empty())
    masks = listing_of(config.conditioning_data_dir, kImages, "conditioning_data_dir",
                       "try: conditioning_data_dir names a folder of masks, each with its image's path and name",
                       {.follow_links = config.follow_links});
  return std::make_shared<ImageFolder>(
      folder, listing_of(folder, kImages, nullptr, nullptr, {.follow_links = config.follow_links}), masks, config);
}

SourcePtr clip_folder_source(const std::string& folder, const DataSourceConfig& config) {
  check(
      config.array_columns.empty(), Code::invalid_config,
      "clip folder '{}': it holds clips and captions; encoded samples are read from dataset_type tfrecord, grain or hf",
      shown(folder));
  return std::make_shared<ImageFolder>(
      folder, listing_of(folder, kClips, nullptr, nullptr, {.follow_links = config.follow_links}), std::nullopt,
      config);
}

const std::set<std::string>& image_endings() { return kImages.extensions; }

bool holds_clips(const Files& files) {
  const auto any = [&](const auto& extensions) {
    return std::ranges::any_of(files, [&](const FoundFile& f) {
      return extensions.contains(lower_extension(split_location(f.location).path));
    });
  };
  std::set<std::string> videos = kClips.extensions;
  videos.erase(".webp");
  std::set<std::string> images = kImages.extensions;
  images.erase(".gif");  // a folder of GIFs contains clips
  return any(videos) && !any(images);
}

}  // namespace md
