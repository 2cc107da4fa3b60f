// Writes folders of captioned files, as image_folder.h reads them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace md {

struct CaptionedFile {
  std::string bytes;
  nlohmann::ordered_json columns;  // the line of metadata.jsonl after file_name: "text", …
};
/// Writes `folder`/0000`extension`, 0001`extension`, … and then metadata.jsonl, each atomically. Removes further files
/// of an earlier call. Throws io.
void write_captioned_files(const std::string& folder, const std::string& extension,
                           const std::vector<CaptionedFile>& files);

}  // namespace md
