// Downloads from the Hugging Face hub into its cache, laid out as huggingface_hub does it (blobs/, snapshots/, refs/,
// locks), so that both share downloads. Source: huggingface_hub's "Understand caching", and the hub's HTTP interface
// (api/models/…, resolve/…). Environment: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE,
// XDG_CACHE_HOME.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace md {

/// A repository of the hub: "owner/name", optionally with the prefix "hf://" or "hf://datasets/" and the suffix
/// "@revision".
struct HubName {
  std::string repository, revision;  // revision: a branch, ref or commit; empty: main
  std::string kind = "models";       // or "datasets"
  bool checks = false;               // "hf://": checks the hub for a newer version than the cached one
};
/// Whether a name may be a repository: owner/name, without path traversal.
bool is_hub_name(const std::string& name);
HubName hub_name(const std::string& name, const std::string& revision = "", const std::string& kind = "models");

/// The cache's folder of a repository; it may not exist.
std::string cache_entry(const HubName& name);
/// The folder of a cached snapshot; empty if it is not cached. A revision is resolved by refs/, or is a commit.
std::string cached_snapshot(const HubName& name);

/// The access token: of set_hub_token, HF_TOKEN or the hub's token file; empty: none. Never logged.
std::string hub_token();
/// Sets the token; empty: uses the environment's.
void set_hub_token(const std::string& token);
bool hub_is_offline();

struct HubFile {
  std::string path;
  int64_t size = 0;
  std::string sha256, git_sha1;  // sha256 of LFS files, git_sha1 of others
};
/// Selects the files of a model repository that a run needs. Of a pipeline: model_index.json and the folders of its
/// components (configs, tokenizers, safetensors weights); else configs and safetensors. `variant` ("fp16") selects
/// weights if they exist, else the default ones. `model_index`: text of model_index.json; empty: none.
std::vector<HubFile> needed_files(const std::vector<HubFile>& files, const std::string& model_index,
                                  const std::string& variant);

/// Downloads the missing files of a snapshot and returns its folder. Logs progress. Resumes interrupted downloads. A
/// file is renamed when its size and digest match, the snapshot when all files exist. `only`: downloads only this file;
/// empty: the needed files, or all data of a dataset. Throws io naming the repository, what was found and what to do:
/// no such repository or revision, a missing or refused token, terms to accept, a full disk, no answer from the server.
std::string download_snapshot(const HubName& name, const std::string& variant = "", const std::string& only = "");

/// Downloads an image from an http or https address: at most `limit` bytes, content type image/…. Refuses hosts of this
/// machine and of private networks unless `local_addresses`. Throws io naming the address.
std::string download_image(const std::string& url, int64_t limit = int64_t{64} << 20, bool local_addresses = false);

}  // namespace md
