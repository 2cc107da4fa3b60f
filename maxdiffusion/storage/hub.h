// Downloads from the Hugging Face hub into its cache, laid out as huggingface_hub does it (blobs/, snapshots/, refs/,
// locks), so that each finds what the other has downloaded. Source: huggingface_hub's "Understand caching", and the
// hub's HTTP interface (api/models/…, resolve/…). Environment: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, HF_TOKEN_PATH,
// HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace md {

/// A repository of the hub: "owner/name", with or without "hf://" or "hf://datasets/" before it and "@revision" behind
/// it.
struct HubName {
  std::string repository, revision;  // revision: a branch, ref or commit; empty: main
  std::string kind = "models";       // or "datasets"
  bool checks = false;               // "hf://": the hub is asked whether the cache is up to date
};
/// Whether a name could be of a repository: one slash, nothing that leads out of the cache.
bool is_hub_name(const std::string& name);
HubName hub_name(const std::string& name, const std::string& revision = "", const std::string& kind = "models");

/// The cache's folder of a repository; it may not exist.
std::string cache_entry(const HubName& name);
/// The folder of a snapshot that is cached; empty: it is not. The revision's commit is that of refs/, or itself.
std::string cached_snapshot(const HubName& name);

/// The token that is sent, of set_hub_token, HF_TOKEN or the hub's token file; empty: none. Never logged.
std::string hub_token();
/// From now on this one; empty: as the environment says.
void set_hub_token(const std::string& token);
bool hub_is_offline();

struct HubFile {
  std::string path;
  int64_t size = 0;
  std::string sha256, git_sha1;  // of LFS files the first, of others the second
};
/// Of the files of a model's repository those that a run needs: of a pipeline model_index.json and the folders of its
/// components (configs, tokenizers, weights as safetensors), else configs and safetensors. Of weights in several
/// variants
/// ("fp16") the one asked for where it is there, else the plain ones. `model_index`: its text; empty: there is none.
std::vector<HubFile> needed_files(const std::vector<HubFile>& files, const std::string& model_index,
                                  const std::string& variant);

/// Downloads a snapshot, or what of it is missing, and returns its folder. Progress is logged. A download that was
/// interrupted goes on where it stopped; a file gets its name when its size and digest are right, the snapshot its when
/// all its files are there. `only`: this file and no other; empty: what is needed, of datasets all data. Throws io
/// naming the repository, what was found and what to do: no such repository or revision, a token that is missing or
/// refused, terms to accept, a full disk, a server that does not answer.
std::string download_snapshot(const HubName& name, const std::string& variant = "", const std::string& only = "");

/// The bytes of an image at an http or https address: at most `limit` bytes, of a content type image/…, and not from
/// hosts of this machine or a private network unless `local_addresses`. Throws io naming the address.
std::string download_image(const std::string& url, int64_t limit = int64_t{64} << 20, bool local_addresses = false);

}  // namespace md
