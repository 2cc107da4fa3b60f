// What the bytes of a checkpoint's files were when it was written: training_state/checksums.json,
//
//   {"algorithm": "XXH3-128", "files": {"unet/diffusion_pytorch_model.safetensors": {"bytes": 10270077736, "hash":
//   "…"}}}
//
// with hashes as `xxhsum -H2` prints them. It names every file of the checkpoint but itself.
#pragma once

#include <map>
#include <string>

namespace md {

inline constexpr const char* kChecksums = "training_state/checksums.json";

/// The text of checksums.json for all files below `folder`, and for `more`: texts by relative path that are about to be
/// written. A file that this process has hashed before (a link of it in an earlier checkpoint) is not read again.
std::string checksums_of(const std::string& folder, const std::map<std::string, std::string>& more);

enum class ChecksumsOf { all, all_but_weights };
/// Throws io naming the first file of the checkpoint `folder` at or below the relative path `part` (empty: any) that is
/// missing, or whose bytes are not those that were written. Older checkpoints, and folders that are none, have no
/// checksums: nothing is done.
void verify_checksums(const std::string& folder, const std::string& part = "", ChecksumsOf which = ChecksumsOf::all);
/// Whether the file `path` has the bytes that a text of checksums.json says `name` has.
bool is_as_said(const std::string& path, const std::string& name, const std::string& checksums);
/// verify_checksums for a component's folder, or a file in one, where that lies in a checkpoint.
void verify_component(const std::string& path);

}  // namespace md
