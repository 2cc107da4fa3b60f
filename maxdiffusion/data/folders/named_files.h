// Files of one folder that texts refer to by name without extension.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace md {

/// The files with one extension in a folder and its subfolders. A name must match a listed file, so it cannot refer
/// outside of the folder.
class NamedFiles {
 public:
  /// `key`: the key that sets the folder, for messages.
  NamedFiles(std::string key, std::string folder, std::string ending);
  /// The file of "name" or "below/name"; the folders may be omitted if only one file has the name. `written`: the text
  /// that refers to it, for messages. Throws invalid_config, with the nearest names, if there is no such file.
  const std::string& path(const std::string& name, const std::string& written);
  /// The names of all files, sorted. Throws invalid_config if the folder cannot be listed.
  std::vector<std::string> names();

 private:
  void list();

  std::string key_, folder_, ending_;
  bool listed_ = false;
  std::map<std::string, std::string> paths_;  // by name
};

}  // namespace md
