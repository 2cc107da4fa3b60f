#include "maxdiffusion/data/folders/data_folders.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/missing_captions.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::string stem_of(const std::string& name) { return fs::path(name).replace_extension().string(); }

/// Captions of kohya's JSON file, by its keys: a path, a name, or a name without extension. `separator` joins caption
/// and tags. Source: kohya's sd-scripts, FineTuningDataset.
std::map<std::string, std::string> kohya_captions(const std::string& file, const std::string& separator) {
  const auto input = open_input(file);
  const nlohmann::json all = parse_json_or_discard(decoded_text(input->read(0, input->size()).bytes, shown(file)));
  check(all.is_object(), Code::io, "{}: expected JSON: {{\"NAME\": {{\"caption\": …}}, …}}", shown(file));
  std::map<std::string, std::string> out;
  for (const auto& [name, row] : all.items()) {
    const auto text = [&, &row = row, &name = name](const char* key) {
      if (!row.is_object() || !row.contains(key) || row[key].is_null()) return std::string();
      check(row[key].is_string(), Code::io, "{}: '{}' of '{}' is no text", shown(file), key, name);
      return row[key].get<std::string>();
    };
    const std::string caption = text("caption"), tags = text("tags");
    std::string both;  // the tags apply to each line
    std::istringstream lines(caption);
    for (std::string line; std::getline(lines, line);)
      both += (both.empty() ? "" : "\n") + line + (tags.empty() ? "" : separator + tags);
    out[name] = caption.empty() ? tags : both;
  }
  return out;
}

/// Calls `f` with each JSON object of a file of lines, and its line's number.
void each_line(const std::string& file, const std::function<void(int64_t number, const nlohmann::json& row)>& f) {
  const auto input = open_input(file);
  std::istringstream lines(decoded_text(input->read(0, input->size()).bytes, shown(file)));
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (trimmed(line).empty()) continue;
    const auto row = parse_json_or_discard(line);
    check(row.is_object(), Code::io, "{}:{}: expected a JSON object, found '{}'", shown(file), number,
          shortened(line, 60));
    f(number, row);
  }
}

/// The keys of a line's reference images, in their order: "control_path", or "control_path_0", "control_path_1", …
std::vector<std::string> control_keys(const nlohmann::json& row) {
  const std::string key = "control_path";
  std::vector<std::string> keys;
  if (row.contains(key)) keys.push_back(key);
  for (int64_t i = 0; row.contains(fmt::format("{}_{}", key, i)); ++i) keys.push_back(fmt::format("{}_{}", key, i));
  return keys;
}

/// The images or clips listed in JSON lines.
std::vector<ImageItem> items_of_lines(const DataFolder& f) {
  const std::string column = f.clips ? "video_path" : "image_path";
  std::vector<ImageItem> items;
  std::map<std::string, int64_t> unread;  // key → lines
  each_line(f.metadata, [&](int64_t number, const nlohmann::json& row) {
    for (const std::string& key : {column, std::string("caption")})
      check(row.contains(key) && row[key].is_string(), Code::io,
            "{}:{}: expected {{\"{}\": …, \"caption\": …}}, found '{}'", shown(f.metadata), number, column,
            shortened(row.dump(), 60));
    const auto path_of = [&](const std::string& key, bool may_be_folder) {
      check(row[key].is_string(), Code::io, "{}:{}: {} is {}; expected a path", shown(f.metadata), number, key,
            row[key].dump());
      std::string path = row[key].get<std::string>();
      std::error_code ec;
      if (!is_remote(path) && !fs::exists(path, ec) && fs::path(path).is_relative()) path = sibling(f.metadata, path);
      check(is_remote(path) || fs::is_regular_file(path, ec) || (may_be_folder && fs::is_directory(path, ec)), Code::io,
            "{}:{}: names '{}', which is no file", shown(f.metadata), number, path);
      return path;
    };
    const std::string path = path_of(column, f.clips);
    items.push_back({.file = path, .name = path, .caption = row["caption"].get<std::string>(), .captioned = true});
    if (std::error_code ec; f.clips && !is_remote(path) && fs::is_directory(path, ec)) {
      items.back().frames = list_frames(path);
      check(!items.back().frames.empty(), Code::io, "{}:{}: names '{}', a folder without png or jpeg frames",
            shown(f.metadata), number, path);
    }
    const std::vector<std::string> controls = control_keys(row);
    check(std::ssize(controls) == f.references_of_lines, Code::io, "{}:{}: {} control images; expected {}{}",
          shown(f.metadata), number, controls.size(), f.references_of_lines,
          f.clips ? ", of a video" : ", as in the first line");
    for (const std::string& key : controls) items.back().references.push_back({path_of(key, false), -1});
    for (const auto& [key, value] : row.items())
      if (key != column && key != "caption" && std::ranges::count(controls, key) == 0) ++unread[key];
  });
  check(!items.empty(), Code::io, "{}: names nothing", shown(f.metadata));
  for (const auto& [key, lines] : unread)
    log_warning("{}: '{}' of {} is not read", shown(f.metadata), key, counted(lines, "line"));
  return items;
}

std::string words_of_name(const std::string& name) {
  std::string words = fs::path(name).stem().string();
  std::ranges::replace_if(
      words, [](char c) { return c == '_' || c == '-'; }, ' ');
  return trimmed(words);
}

std::vector<ImageItem> images_of(const DataFolder& f) {
  const bool by_lines = f.metadata.ends_with(".jsonl");
  std::vector<ImageItem> items = by_lines ? items_of_lines(f)
                                          : list_image_folder(f.folder, {.caption_extensions = f.caption_extensions,
                                                                         .recursive = f.recursive,
                                                                         .clips = f.clips,
                                                                         .follow_links = f.follow_links,
                                                                         .quiet = true});
  if (!f.metadata.empty() && !by_lines) {
    const std::map<std::string, std::string> captions = kohya_captions(f.metadata, f.captions.separator);
    std::set<std::string> used;
    const auto left_out = std::erase_if(items, [&](ImageItem& item) {
      for (const std::string& name :
           {item.file, item.name, fs::path(item.name).filename().string(), stem_of(item.file), stem_of(item.name)})
        if (const auto found = captions.find(name); found != captions.end()) {
          item.caption = found->second, item.captioned = true;
          used.insert(name);
          return false;
        }
      return true;
    });
    check(!items.empty(), Code::io, "{}: names no image of '{}'", shown(f.metadata), shown(f.folder));
    if (left_out > 0)
      log_warning("{}: {} of '{}' {} not named, and left out", shown(f.metadata),
                  counted(static_cast<int64_t>(left_out), "image"), shown(f.folder), left_out == 1 ? "is" : "are");
    const auto unknown = std::ranges::find_if(captions, [&](const auto& c) { return !used.contains(c.first); });
    if (unknown != captions.end())
      log_warning("{}: {} of {} names are of no image of '{}', the first is '{}'", shown(f.metadata),
                  captions.size() - used.size(), captions.size(), shown(f.folder), unknown->first);
  }
  if (f.most >= 0 && std::ssize(items) > f.most) items.resize(static_cast<size_t>(f.most));
  MissingCaptions count{.where = fmt::format("{}: '{}'", f.where, shown(f.folder.empty() ? f.metadata : f.folder)),
                        .things = f.clips ? "clips" : "images",
                        .all = std::ssize(items)};
  for (const std::string& e : f.caption_extensions) count.expected += (count.expected.empty() ? "" : " or ") + e;
  if (!f.metadata.empty()) count.expected = shown(f.metadata);
  std::string instead;
  for (ImageItem& item : items) {
    if (f.only_caption)
      item.caption = *f.only_caption;
    else if (f.names_are_captions)
      item.caption = decoded_text(words_of_name(item.name), shown(item.file));
    else if (item.caption.empty() && (!item.captioned || f.missing_caption)) {
      check(f.missing_caption.has_value(), Code::io, "{}: no caption; expected a {} file next to it", shown(item.file),
            count.expected);
      item.caption = instead = *f.missing_caption;
      ++count.missing;
    } else {
      count.missing += item.caption.empty();
    }
  }
  if (!instead.empty()) count.instead = fmt::format("'{}'", instead);
  const CaptionRules& added = f.captions;
  if (instead.empty() && !(added.prefix + added.suffix + added.trigger).empty())
    count.instead = "what the dataset adds to captions";
  warn_of_missing(count);
  return items;
}

void check_folder(const DataFolder& f) {
  check(f.repeats > 0, Code::invalid_config, "{}: {} repeats; expected 1 or more", f.where, f.repeats);
  check(!f.captions.separator.empty(), Code::invalid_config, "{}: caption_separator is empty; expected a text",
        f.where);
}

}  // namespace

int64_t control_images_of_lines(const std::string& file) {
  std::optional<int64_t> count;
  each_line(file, [&](int64_t, const nlohmann::json& row) {
    if (!count) count = std::ssize(control_keys(row));
  });
  return count.value_or(0);
}

struct DataFolders::Item {
  ImageItem image;
  FoundFile mask;
  int64_t folder = 0, repeats = 1;
};

struct DataFolders::Listed {
  std::vector<DataFolder> folders;
  std::vector<Item> items;
  std::string fingerprint;
  DataIdentity identity;
  bool captions_vary = false;

  explicit Listed(std::vector<DataFolder> all) : folders(std::move(all)) {
    for (size_t i = 0; i < folders.size(); ++i) {
      try {
        add(static_cast<int64_t>(i), folders[i]);
      } catch (Error& e) {
        throw e.note("in " + folders[i].where);
      }
    }
    balance();
    std::vector<FoundFile> files;
    std::string names, captions;
    for (const Item& item : items) {
      const CaptionRules& rules = folders[static_cast<size_t>(item.folder)].captions;
      const std::string& text = item.image.caption;
      const bool any = varies(rules, text);
      captions_vary |= any;
      // Random choices are made in each step, and not cached.
      const std::string fixed = any ? "" : applied(rules, text, 0, shown(item.image.file));
      names += fmt::format("{} {} {}\n", item.folder, item.repeats, item.image.name);
      captions += (any ? text : fixed) + "\n";
      std::string box;
      if (const auto& b = item.image.box) box = fmt::format("{} {} {} {}", b->left, b->top, b->width, b->height);
      files.push_back({fmt::format("{}\n{}\n{}", item.image.file, fixed, box), item.image.size, item.image.modified});
      for (const FoundFile& frame : item.image.frames) files.push_back(frame);
      for (const FoundFile& reference : item.image.references) files.push_back(reference);
      if (!item.mask.location.empty()) files.push_back(item.mask);
    }
    fingerprint = fingerprint_of(files);
    identity = {.names = content_hash(names), .captions = content_hash(captions)};
  }

 private:
  void add(int64_t number, const DataFolder& f) {
    check_folder(f);
    std::vector<ImageItem> found = images_of(f);
    std::vector<FoundFile> masks;
    if (!f.masks.empty()) masks = list_partners(f.masks, found, "conditioning_data_dir", "mask", f.follow_links);
    for (const std::string& folder : f.references) {
      const std::vector<FoundFile> references =
          list_partners(folder, found, "control images", "control image", f.follow_links);
      for (size_t k = 0; k < found.size(); ++k) found[k].references.push_back(references[k]);
    }
    for (size_t k = 0; k < found.size(); ++k)
      items.push_back({.image = std::move(found[k]),
                       .mask = masks.empty() ? FoundFile{} : masks[k],
                       .folder = number,
                       .repeats = f.repeats});
    log_info("{}: '{}': {} × {}{}", f.where, shown(f.folder.empty() ? f.metadata : f.folder),
             counted(std::ssize(found), f.clips ? "clip" : "image"), counted(f.repeats, "repeat"),
             f.regularization ? ", regularization" : "");
  }
  bool regularizes(const Item& item) const { return folders[static_cast<size_t>(item.folder)].regularization; }
  int64_t group(const Item& item) const { return folders[static_cast<size_t>(item.folder)].group; }
  void balance() {
    std::map<int64_t, int64_t> wanted;
    for (const Item& item : items)
      if (!regularizes(item)) wanted[group(item)] += item.repeats;
    for (const auto& [of_group, samples] : wanted) {
      std::vector<Item*> all;
      for (Item& item : items)
        if (regularizes(item) && group(item) == of_group) all.push_back(&item);
      int64_t n = 0;
      for (Item* item : all) {
        if (n >= samples) item->repeats = 0;
        n += item->repeats;
      }
      for (size_t i = 0; !all.empty() && n < samples; ++n, ++i) ++all[i % all.size()]->repeats;
    }
    for (const Item& item : items)
      check(wanted.contains(group(item)), Code::invalid_config,
            "{}: regularization images alone; expected a folder of other images next to them",
            folders[static_cast<size_t>(item.folder)].where);
    std::erase_if(items, [](const Item& item) { return item.repeats == 0; });
  }
};

DataFolders::DataFolders(std::string name, std::vector<DataFolder> folders)
    : DataFolders(std::move(name), std::make_unique<const Listed>(std::move(folders))) {}
DataFolders::DataFolders(std::string name, std::unique_ptr<const Listed> listed)
    : RecordSource(std::move(name), listed->fingerprint, listed->identity), listed_(std::move(listed)) {}
DataFolders::~DataFolders() = default;

int64_t DataFolders::size() const { return std::ssize(listed_->items); }
bool DataFolders::masks() const {
  return std::ranges::any_of(listed_->folders, [](const DataFolder& f) { return !f.masks.empty(); });
}
Record DataFolders::read(int64_t index) const {
  const Item& item = at(index);
  Record r = read_item(item.image, item.mask.location.empty() ? nullptr : &item.mask);
  r.folder = item.folder;
  return r;
}
RecordContent DataFolders::content(int64_t index, FileHashes& hashes) const {
  const Item& item = at(index);
  RecordContent content = content_of(item.image, item.mask.location.empty() ? nullptr : &item.mask, hashes);
  content.folder = item.folder;
  return content;
}
const DataFolders::Item& DataFolders::at(int64_t index) const { return listed_->items[static_cast<size_t>(index)]; }
int64_t DataFolders::repeats(int64_t index) const { return at(index).repeats; }
const std::string& DataFolders::caption(int64_t index) const { return at(index).image.caption; }
int64_t DataFolders::folder(int64_t index) const { return at(index).folder; }
const std::vector<DataFolder>& DataFolders::folders() const { return listed_->folders; }
bool DataFolders::captions_vary() const { return listed_->captions_vary; }

}  // namespace md
