#include "maxdiffusion/data/folders/named_files.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"

namespace md {

NamedFiles::NamedFiles(std::string key, std::string folder, std::string ending)
    : key_(std::move(key)), folder_(std::move(folder)), ending_(std::move(ending)) {}

void NamedFiles::list() {
  namespace fs = std::filesystem;
  if (std::exchange(listed_, true)) return;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder_, error), end; !error && at != end; at.increment(error))
    if (at->path().extension() == ending_ && at->is_regular_file()) {
      const std::string name = at->path().lexically_relative(folder_).generic_string();
      paths_[name.substr(0, name.size() - ending_.size())] = at->path();
    }
  check(!error, Code::invalid_config, "{} is '{}', which cannot be listed ({}); expected a folder", key_, folder_,
        error.message());
}

std::vector<std::string> NamedFiles::names() {
  list();
  std::vector<std::string> out;
  for (const auto& [name, path] : paths_) out.push_back(name);
  return out;
}

const std::string& NamedFiles::path(const std::string& name, const std::string& written) {
  if (folder_.empty())
    throw Error(Code::invalid_config,
                fmt::format("{} is empty; expected the folder of '{}{}', which {} names", key_, name, ending_, written))
        .note(fmt::format("try: {}=FOLDER", key_));
  list();
  if (const auto found = paths_.find(name); found != paths_.end()) return found->second;
  std::vector<std::string> names, same_ending;
  for (const auto& [known, path] : paths_) {
    names.push_back(known);
    if (known.ends_with("/" + name)) same_ending.push_back(known);
  }
  if (same_ending.size() == 1) return paths_.at(same_ending[0]);
  check(same_ending.empty(), Code::invalid_config, "{} names two files below '{}'; expected one of: {}, {}", written,
        folder_, same_ending.empty() ? "" : same_ending[0], same_ending.empty() ? "" : same_ending[1]);
  check(!names.empty(), Code::invalid_config, "{} names '{}{}'; expected a file below {}='{}', which has none like it",
        written, name, ending_, key_, folder_);
  constexpr size_t kMost = 12;
  std::string list = nearest_first(name, names);
  if (names.size() > kMost) {
    size_t end = 0;
    for (size_t i = 0; i < kMost; ++i) end = list.find(", ", end + 1);
    list = list.substr(0, end) + ", …";
  }
  fail(Code::invalid_config, "{} names no file below {}='{}'; expected one of: {}", written, key_, folder_, list);
}

}  // namespace md
