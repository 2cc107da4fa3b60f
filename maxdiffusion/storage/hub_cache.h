// Names of the Hugging Face hub as folders of its cache; what is not cached is downloaded (hub.h).
#pragma once

#include <string>

namespace md {

/// `name` itself where it is a folder; else, for "owner/name" or "hf://owner/name@revision", the folder of its snapshot
/// of `revision` (a branch, a ref or a commit; empty: main) in the hub's cache. What is not cached is downloaded,
/// unless HF_HUB_OFFLINE is set; with "hf://" the hub is asked whether there is something newer. `kind`: "models" or
/// "datasets". `variant`: of weights, such as "fp16". Throws io saying what was looked for and what to do, as
/// download_snapshot does.
std::string local_folder(const std::string& name, const std::string& revision = "", const std::string& kind = "models",
                         const std::string& variant = "");
/// A file of a folder or of a repository, of which only this file is downloaded. Throws io likewise.
std::string local_file(const std::string& name, const std::string& file, const std::string& revision = "");

}  // namespace md
