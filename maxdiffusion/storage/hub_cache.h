// Names of the Hugging Face hub as folders of its cache; missing snapshots are downloaded (hub.h).
#pragma once

#include <string>

namespace md {

/// Returns `name` if it is a folder; else, for "owner/name" or "hf://owner/name@revision", the folder of its snapshot
/// of `revision` (a branch, a ref or a commit; empty: main) in the hub's cache. Downloads missing files unless
/// HF_HUB_OFFLINE is set; with "hf://", checks the hub for a newer version. `kind`: "models" or "datasets". `variant`:
/// variant of the weights, such as "fp16". Throws io naming what was not found and what to do, as download_snapshot
/// does.
std::string local_folder(const std::string& name, const std::string& revision = "", const std::string& kind = "models",
                         const std::string& variant = "");
/// A file of a folder or of a repository; downloads only this file. Throws io as above.
std::string local_file(const std::string& name, const std::string& file, const std::string& revision = "");

}  // namespace md
