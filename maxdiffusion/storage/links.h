// Local folders with symbolic links.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/storage/storage.h"

namespace md {

/// Skipped links, FIFOs, sockets and devices: path → reason.
using SkippedLinks = std::map<std::string, std::string>;
inline constexpr const char* kNoRegularFile = "no regular file";
/// list_files without dangling links, links to folders that it lists anyway, special files and, unless `out_of_folder`,
/// links out of the folder; `left_out` receives those. Links from a snapshot of the Hugging Face cache to that
/// repository's blobs are always followed.
std::vector<FoundFile> list_files(const std::string& location, SkippedLinks& left_out, bool out_of_folder = false);

}  // namespace md
