// Hugging Face datasets: Parquet or Arrow files in splits, the output of save_to_disk, or a folder of images or clips.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/data/records/kinds.h"

namespace md {
namespace {

constexpr std::string_view kTables = ".parquet .arrow .feather";
std::string path_of(const FoundFile& f) { return shown(f.location); }

template <class F>
Files only(const Files& files, F keep) {
  Files out;
  std::ranges::copy_if(files, std::back_inserter(out), keep);
  return out;
}

/// The files of one split, by file and folder names as in Hugging Face datasets: "train-00000-of-00002",
/// "data/train/0000.parquet". All files if no name contains a split.
Files of_split(const Files& files, const std::string& root, const std::string& split) {
  static const std::initializer_list<const char*> kSplits = {"train", "test", "validation", "valid", "dev", "eval"};
  const auto name_contains = [&](const FoundFile& f, const std::string& word) {
    const std::string path = path_of(f).substr(std::min(shown(root).size(), path_of(f).size()));
    for (size_t at = path.find(word); at != std::string::npos; at = path.find(word, at + 1)) {
      const size_t end = at + word.size();
      if ((at == 0 || !std::isalnum(static_cast<unsigned char>(path[at - 1]))) &&
          (end == path.size() || !std::isalnum(static_cast<unsigned char>(path[end]))))
        return true;
    }
    return false;
  };
  Files mine = only(files, [&](const FoundFile& f) { return name_contains(f, split); });
  if (!mine.empty()) return mine;
  const bool any = std::ranges::any_of(files, [&](const FoundFile& f) {
    return std::ranges::any_of(kSplits, [&](const char* s) { return name_contains(f, s); });
  });
  check(!any, Code::io, "'{}': no file of split '{}'; the first of {} is {}", shown(root), split, files.size(),
        path_of(files[0]));
  return files;
}

/// Output of datasets.save_to_disk: state.json names the files of a split; dataset_dict.json names the splits.
std::optional<Files> saved_to_disk(const Files& files, const std::string& root, const std::string& split) {
  const auto named = [&](const std::string& path) {
    const auto it = std::ranges::find(files, shown(path), path_of);
    return it == files.end() ? nullptr : &*it;
  };
  const auto read_json = [](const FoundFile& f) {
    const auto file = open_input(f);
    auto j = parse_json_or_discard(file->read(0, file->size()).bytes);
    check(j.is_object(), Code::io, "{}: not a JSON object", file->name());
    return j;
  };
  std::string folder = root;
  if (const FoundFile* dict = named(below(root, "dataset_dict.json"))) {
    const auto splits = read_json(*dict).value("splits", std::vector<std::string>());
    check(std::ranges::find(splits, split) != splits.end(), Code::io, "{}: no split '{}'; it has: {}", path_of(*dict),
          split, joined(splits));
    folder = below(root, split);
  }
  const FoundFile* state = named(below(folder, "state.json"));
  if (!state) return std::nullopt;
  Files found;
  const auto j = read_json(*state);
  check(j.contains("_data_files") && j["_data_files"].is_array(), Code::io, "{}: no member _data_files",
        path_of(*state));
  if (j.contains("_indices_data_files") && j["_indices_data_files"].is_array() && !j["_indices_data_files"].empty())
    fail(Code::io, "{}: saved with an indices mapping; expected a dataset saved after flatten_indices()",
         path_of(*state));
  for (const auto& row : j["_data_files"]) {
    const std::string name = row.is_object() ? row.value("filename", "") : "";
    const FoundFile* f = named(below(folder, name));
    check(f != nullptr, Code::io, "{}: names '{}', which does not exist", path_of(*state), name);
    found.push_back(*f);
  }
  check(!found.empty(), Code::io, "{}: names no data files", path_of(*state));
  return found;
}

}  // namespace

// Opens Parquet, Arrow, an image folder or a clip folder, depending on the files.
SourcePtr hf_source(const std::string& where, const DataSourceConfig& config) {
  const Files files = list_inputs(where);
  if (split_locations(where).size() == 1) {
    if (const auto saved = saved_to_disk(files, where, config.train_split)) return table_source(*saved, config);
  }
  const Files tables = only(files, [](const FoundFile& f) { return has_ending(f, kTables); });
  if (tables.empty()) {
    const bool folder = is_remote(where)
                            ? path_of(files[0]).starts_with(shown(where) + (where.ends_with('/') ? "" : "/"))
                            : std::filesystem::is_directory(where);
    check(folder, Code::io, "'{}': expected .parquet or .arrow files, or an image folder; the first of {} files is {}",
          shown(where), files.size(), path_of(files[0]));
    // Images may be in one folder per split.
    const std::string split_folder = below(where, config.train_split);
    const bool split = std::ranges::any_of(
        files, [&](const FoundFile& f) { return path_of(f).starts_with(shown(split_folder) + "/"); });
    check(split || config.train_split == "train", Code::io, "'{}': no folder of split '{}'", shown(where),
          config.train_split);
    return (holds_clips(files) ? clip_folder_source : image_folder_source)(split ? split_folder : where, config);
  }
  return table_source(of_split(tables, where, config.train_split), config);
}

SourcePtr tf_source(const std::string& where, const DataSourceConfig& config) { return hf_source(where, config); }

}  // namespace md
