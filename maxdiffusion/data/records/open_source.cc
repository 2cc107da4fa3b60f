#include "maxdiffusion/data/records/open_source.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/data/records/kinds.h"

namespace md {
namespace {

bool ends_with_any(const std::string& s, std::initializer_list<const char*> ends) {
  return std::ranges::any_of(ends, [&](const char* e) { return s.ends_with(e); });
}
std::string path_of(const FoundFile& f) { return shown(f.location); }
bool is_table(const FoundFile& f) { return ends_with_any(path_of(f), {".parquet", ".arrow", ".feather"}); }

template <class F>
Files only(const Files& files, F keep) {
  Files out;
  std::ranges::copy_if(files, std::back_inserter(out), keep);
  return out;
}

/// The files of one split, told from their names and folders as Hugging Face tells them: "train-00000-of-00002",
/// "data/train/0000.parquet". Where no name says a split, all are.
Files of_split(const Files& files, const std::string& root, const std::string& split) {
  static const std::initializer_list<const char*> kSplits = {"train", "test", "validation", "valid", "dev", "eval"};
  const auto says = [&](const FoundFile& f, const std::string& word) {
    const std::string path = path_of(f).substr(std::min(shown(root).size(), path_of(f).size()));
    for (size_t at = path.find(word); at != std::string::npos; at = path.find(word, at + 1)) {
      const size_t end = at + word.size();
      if ((at == 0 || !std::isalnum(static_cast<unsigned char>(path[at - 1]))) &&
          (end == path.size() || !std::isalnum(static_cast<unsigned char>(path[end]))))
        return true;
    }
    return false;
  };
  Files mine = only(files, [&](const FoundFile& f) { return says(f, split); });
  if (!mine.empty()) return mine;
  const bool any = std::ranges::any_of(files, [&](const FoundFile& f) {
    return std::ranges::any_of(kSplits, [&](const char* s) { return says(f, s); });
  });
  check(!any, Code::io, "'{}': no file of split '{}'; the first of {} is {}", shown(root), split, files.size(),
        path_of(files[0]));
  return files;
}

/// What datasets.save_to_disk wrote: state.json names the files of a split; dataset_dict.json the splits.
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
  check(j.contains("_data_files") && j["_data_files"].is_array(), Code::io, "{}: no _data_files", path_of(*state));
  if (j.contains("_indices_data_files") && j["_indices_data_files"].is_array() && !j["_indices_data_files"].empty())
    fail(Code::io, "{}: the data set was saved with an indices mapping; save it after flatten_indices()",
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

/// Parquet, Arrow, an image folder or a clip folder, whichever a folder holds.
SourcePtr hugging_face(const std::string& where, const DataSourceConfig& config) {
  const Files files = list_inputs(where);
  if (where.find(',') == std::string::npos) {
    if (const auto saved = saved_to_disk(files, where, config.train_split)) return table_source(*saved, config);
  }
  const Files tables = only(files, is_table);
  if (tables.empty()) {
    const bool folder = is_remote(where)
                            ? path_of(files[0]).starts_with(shown(where) + (where.ends_with('/') ? "" : "/"))
                            : std::filesystem::is_directory(where);
    check(folder, Code::io, "'{}': expected .parquet or .arrow files, or an image folder; the first of {} files is {}",
          shown(where), files.size(), path_of(files[0]));
    // Pictures may lie in a folder for each split.
    const std::string own = below(where, config.train_split);
    const bool split =
        std::ranges::any_of(files, [&](const FoundFile& f) { return path_of(f).starts_with(shown(own) + "/"); });
    check(split || config.train_split == "train", Code::io, "'{}': no folder of split '{}'", shown(where),
          config.train_split);
    return (holds_clips(files) ? clip_folder_source : image_folder_source)(split ? own : where, config);
  }
  return table_source(of_split(tables, where, config.train_split), config);
}

SourcePtr tfrecord(const std::string& where, const DataSourceConfig& config) {
  return tfrecord_source(list_inputs(where), config);
}
SourcePtr webdataset(const std::string& where, const DataSourceConfig& config) {
  const Files files = list_inputs(where),
              tars = only(files, [](auto&f) { return ends_with_any(path_of(f), {".tar"}); });
  check(!tars.empty(), Code::io, "'{}': no .tar file; the first of {} files is {}", shown(where), files.size(),
        path_of(files[0]));
  return tar_source(tars, config);
}
SourcePtr grain(const std::string& where, const DataSourceConfig& config) {
  return array_record_source(list_inputs(where), config);
}

struct Kind {
  std::string_view name;
  SourcePtr (*open)(const std::string& where, const DataSourceConfig&);
};
// `tf` is the reference's name for a whole Hugging Face data set.
constexpr Kind kKinds[] = {{"image_folder", image_folder_source},
                           {"clip_folder", clip_folder_source},
                           {"hf", hugging_face},
                           {"tf", hugging_face},
                           {"tfrecord", tfrecord},
                           {"webdataset", webdataset},
                           {"grain", grain},
                           {"synthetic", nullptr}};

std::string location(const DataSourceConfig& c) {
  for (const std::string* s : {&c.hf_train_files, &c.grain_train_files, &c.train_data_dir, &c.hf_data_dir}) {
    if (!s->empty()) return *s;
  }
  check(!c.dataset_name.empty(), Code::invalid_config,
        "no data: give train_data_dir, hf_train_files or grain_train_files (dataset_type: one of {})",
        joined(data_kinds()));
  check(is_remote(c.dataset_name) || std::filesystem::exists(c.dataset_name), Code::invalid_config,
        "dataset_name '{}' is not a folder: nothing is fetched from a hub; fetch it, then give its folder",
        c.dataset_name);
  return c.dataset_name;
}

/// By the names of the files.
std::string kind_of(const std::string& where) {
  const Files files = list_inputs(where);
  const auto has = [&](auto... ends) {
    return std::ranges::any_of(files, [&](const FoundFile& f) { return ends_with_any(path_of(f), {ends...}); });
  };
  if (has(".tar")) return "webdataset";
  if (has(".tfrecord", ".tfrecords", ".tfrec")) return "tfrecord";
  if (has(".array_record", ".arrayrecord")) return "grain";
  if (has(".parquet", ".arrow", ".feather")) return "hf";
  return holds_clips(files) ? "clip_folder" : "image_folder";
}

}  // namespace

std::vector<std::string> data_kinds() {
  std::vector<std::string> names;
  for (const Kind& k : kKinds) names.emplace_back(k.name);
  return names;
}

std::shared_ptr<const RecordSource> open_source(const DataSourceConfig& config) {
  std::string type = config.dataset_type;
  if (type == "synthetic") return first_of(synthetic_source(config), config.max_train_samples);
  if (!type.empty()) {
    check(std::ranges::find(kKinds, type, &Kind::name) != std::end(kKinds), Code::invalid_config,
          "dataset_type '{}' is not one of: {}", type, joined(data_kinds()));
  }
  const std::string where = location(config);
  if (type.empty()) type = kind_of(where);
  const Kind& kind = *std::ranges::find(kKinds, type, &Kind::name);
  check(config.train_split == "train" || kind.open == hugging_face, Code::invalid_config,
        "train_split '{}': data of kind {} has no splits; leave it at train", config.train_split, type);
  SourcePtr source = kind.open(where, config);
  check(source->size() != 0, Code::io, "{}: there are no records", source->name());
  check(config.conditioning_data_dir.empty() || source->masks(), Code::invalid_config,
        "{}: conditioning_data_dir ('{}') needs data that is an image folder; for other kinds try alpha_mask=true",
        source->name(), shown(config.conditioning_data_dir));
  return first_of(std::move(source), config.max_train_samples);
}

void check_claim(int64_t count, const FoundFile& file, const char* what) {
  check(count >= 0 && count <= 64 * file.size, Code::io, "{}: damaged: it says it holds {} {} in {} bytes",
        shown(file.location), count, what, file.size);
}

std::string place_of(const Files& files) {
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

std::string columns_key(const DataSourceConfig& c) {
  return c.array_columns.empty() ? " columns " + c.image_column + ", " + c.caption_column
                                 : " arrays " + joined(c.array_columns);
}

WantedColumns wanted_columns(const DataSourceConfig& config, const std::vector<std::string>& columns,
                             const std::string& where) {
  const auto has = [&](const std::string& c) { return std::ranges::find(columns, c) != columns.end(); };
  WantedColumns w;
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
  }
  for (const std::string& a : config.array_columns) want(a, true);
  return w;
}

}  // namespace md
