// Folders of this machine in which there may be links.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/storage/storage.h"

namespace md {

/// Links that are not followed, and FIFOs, sockets and devices: path → why.
using SkippedLinks = std::map<std::string, std::string>;
inline constexpr const char* kNoRegularFile = "no regular file";
/// list_files, with links out of the folder, to folders in it and to nothing left out, which `left_out` gets, with
/// what is no regular file. Files of a snapshot in the Hugging Face cache are links to that repository's blobs: they
/// stay.
std::vector<FoundFile> list_files(const std::string& location, SkippedLinks& left_out);

}  // namespace md
