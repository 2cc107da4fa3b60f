#include "maxdiffusion/data/records/open_source.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/missing_captions.h"

namespace md {
namespace {

struct Kind {
  std::string_view name, endings;
  bool splits;
  SourcePtr (*open)(const std::string& where, const DataSourceConfig&);
};
#define KIND(name, endings, splits) {#name, endings, splits, name##_source},
constexpr Kind kKinds[] = {DATA_KINDS(KIND)};
#undef KIND

/// The location of the data, and its key.
std::pair<std::string, const char*> location(const DataSourceConfig& c) {
  for (const auto& [key, where] :
       {std::pair{"hf_train_files", &c.hf_train_files}, std::pair{"grain_train_files", &c.grain_train_files},
        std::pair{"train_data_dir", &c.train_data_dir}, std::pair{"hf_data_dir", &c.hf_data_dir}})
    if (!where->empty()) return {*where, key};
  check(!c.dataset_name.empty(), Code::invalid_config,
        "train_data_dir is empty; expected a location of data in train_data_dir, hf_train_files or grain_train_files "
        "(dataset_type: one of {})",
        joined(data_kinds()));
  check(is_remote(c.dataset_name) || std::filesystem::exists(c.dataset_name), Code::invalid_config,
        "dataset_name '{}' is not a folder; expected one: this function downloads nothing", c.dataset_name);
  return {c.dataset_name, "dataset_name"};
}

/// The kind, by the names of the files.
const Kind& kind_of(const std::string& where) {
  const Files files = list_inputs(where);
  const auto holds = [&](const Kind& k) {
    return std::ranges::any_of(files, [&](const FoundFile& f) { return has_ending(f, k.endings); });
  };
  if (const auto* kind = std::ranges::find_if(kKinds, holds); kind != std::end(kKinds)) return *kind;
  return *std::ranges::find(kKinds, holds_clips(files) ? "clip_folder" : "image_folder", &Kind::name);
}

}  // namespace

std::vector<std::string> data_kinds() {
  std::vector<std::string> names;
  for (const Kind& k : kKinds) names.emplace_back(k.name);
  return names;
}

bool holds_clips(const DataSourceConfig& config) {
  if (!config.folders.empty()) return std::ranges::any_of(config.folders, &DataFolder::clips);
  return (config.dataset_type.empty() ? kind_of(location(config).first).name : config.dataset_type) == "clip_folder";
}

std::shared_ptr<const RecordSource> open_source(const DataSourceConfig& config) {
  if (!config.folders.empty()) {
    std::vector<DataFolder> folders = config.folders;
    for (DataFolder& f : folders) f.follow_links = config.follow_links;
    return std::make_shared<DataFolders>(config.folders_name, std::move(folders));
  }
  const Kind* kind = std::ranges::find(kKinds, config.dataset_type, &Kind::name);
  check(config.dataset_type.empty() || kind != std::end(kKinds), Code::invalid_config,
        "dataset_type is '{}'; expected one of: {}", config.dataset_type,
        nearest_first(config.dataset_type, data_kinds()));
  const auto [where, key] =
      config.dataset_type == "synthetic" ? std::pair{std::string(), "dataset_type"} : location(config);
  SourcePtr source;
  try {
    if (config.dataset_type.empty()) kind = &kind_of(where);
    check(config.train_split == "train" || kind->splits, Code::invalid_config,
          "train_split '{}': data of kind {} has no splits; leave it at train", config.train_split, kind->name);
    source = kind->open(where, config);
  } catch (Error& e) {
    throw e.note(fmt::format("in the data of {}", key));
  }
  check(source->size() != 0, Code::io, "{}: no records", source->name());
  check(config.conditioning_data_dir.empty() || source->masks(), Code::invalid_config,
        "{}: conditioning_data_dir ('{}') is for image folders; for other kinds of data try alpha_mask=true",
        source->name(), shown(config.conditioning_data_dir));
  const bool counts = config.captions && config.array_columns.empty() && !source->captions_are_counted();
  source = first_records(std::move(source), config.max_train_samples);
  return counts ? with_counted_captions(std::move(source)) : source;
}

bool has_ending(const FoundFile& file, std::string_view endings) {
  const std::string path = shown(file.location);
  for (size_t at = 0; at < endings.size();) {
    const size_t end = std::min(endings.find(' ', at), endings.size());
    if (path.ends_with(endings.substr(at, end - at))) return true;
    at = end + 1;
  }
  return false;
}

void check_declared_count(int64_t count, const FoundFile& file, const char* what) {
  check(count >= 0 && count <= 64 * file.size, Code::io, "{}: damaged: it declares {} {} in {} bytes",
        shown(file.location), count, what, file.size);
}

std::string files_summary(const Files& files) {
  return shown(files[0].location) + (files.size() == 1 ? "" : fmt::format(" and {} more files", files.size() - 1));
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& n : names) all += (all.empty() ? "" : ", ") + n;
  return all.empty() ? "none" : all;
}

std::string trimmed(const std::string& s) {
  const size_t a = s.find_first_not_of(" \t\r\n");
  return a == std::string::npos ? "" : s.substr(a, s.find_last_not_of(" \t\r\n") - a + 1);
}

std::vector<std::string> DataSourceConfig::reference_columns() const {
  std::vector<std::string> names;
  std::istringstream all(cond_image_column);
  for (std::string name; std::getline(all, name, ',');) {
    names.push_back(trimmed(name));
    check(!names.back().empty(), Code::invalid_config, "cond_image_column is '{}'; expected names of columns",
          cond_image_column);
  }
  return names;
}

std::string columns_key(const DataSourceConfig& c) {
  std::string images = " columns " + c.image_column + ", " + c.caption_column;
  if (!c.cond_image_column.empty()) images += " from " + joined(c.reference_columns());
  return c.array_columns.empty() ? images : " arrays " + joined(c.array_columns);
}

SelectedColumns selected_columns(const DataSourceConfig& config, const std::vector<std::string>& columns,
                                 const std::string& where) {
  const auto has = [&](const std::string& c) { return std::ranges::find(columns, c) != columns.end(); };
  SelectedColumns w;
  const auto want = [&](const std::string& alternatives, bool array) {
    std::string first;
    for (size_t start = 0; start <= alternatives.size();) {
      const size_t end = std::min(alternatives.find('|', start), alternatives.size());
      const std::string name = alternatives.substr(start, end - start);
      if (name.empty() && start > 0) return;
      if (first.empty()) first = name;
      if (has(name)) {
        w.names.push_back(name);
        w.keys.push_back(array ? first : "");
        return;
      }
      start = end + 1;
    }
    fail(Code::io, "{}: no column '{}'; it has: {}", where, alternatives, joined(columns));
  };
  if (config.array_columns.empty()) {
    want(config.image_column, false);
    want(config.caption_column, false);
    for (const std::string& reference : config.reference_columns()) want(reference, false);
  }
  for (const std::string& a : config.array_columns) want(a, true);
  return w;
}

}  // namespace md
