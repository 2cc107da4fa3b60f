// The cache in which Hugging Face's tools keep what they have fetched: names become folders, without any network.
// Source: huggingface_hub, "Understand caching" (layout of models--<owner>--<name>/{refs,snapshots}).
#pragma once

#include <string>

namespace md {

/// `name` itself where it is a folder; else, for "owner/name", the folder of its snapshot of `revision` (a branch, a
/// ref or a commit; empty: main; one that is not cached: main, with a warning) under $HF_HUB_CACHE, $HF_HOME/hub or
/// ~/.cache/huggingface/hub. `kind`: "models" or "datasets". Throws io saying what was looked for and how to fetch it.
std::string local_folder(const std::string& name, const std::string& revision = "", const std::string& kind = "models");

}  // namespace md
