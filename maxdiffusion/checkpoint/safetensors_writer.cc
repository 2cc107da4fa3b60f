// Writes safetensors files. The bytes are those of the reference implementation for the same tensors and at most one
// metadata entry. Nothing is copied: arrays are written to the file one after the other.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/safetensors_dtype.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Named = std::pair<const std::string*, const ArrayToWrite*>;

/// Widest elements first, so that every tensor is aligned; by name within a type.
std::vector<Named> file_order(const ArraysToWrite& tensors) {
  std::vector<Named> order;
  for (const auto& [name, array] : tensors) order.emplace_back(&name, &array);
  std::stable_sort(order.begin(), order.end(), [](const Named& a, const Named& b) {
    return safetensors_rank(a.second->shape.dtype) > safetensors_rank(b.second->shape.dtype);
  });
  return order;
}

std::string header_of(const std::vector<Named>& order, const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const auto& [name, array] : order) {
    const uint64_t end = at + static_cast<uint64_t>(array->shape.bytes());
    header[*name] = {{"dtype", kSafetensorsDTypes[safetensors_rank(array->shape.dtype)].name},
                     {"shape", array->shape.dims},
                     {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

/// Writes the file without renaming it, so that shards can appear together.
void write_plain(const std::string& path, const ArraysToWrite& tensors,
                 const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, array] : tensors) {
    check(name != "__metadata__", Code::io, "write '{}': a tensor cannot be named '__metadata__'", path);
  }
  const auto order = file_order(tensors);
  const std::string header = header_of(order, metadata);
  const uint64_t length = header.size();
  FileWriter w(path);
  w.write(&length, sizeof length);
  w.write(header.data(), header.size());
  for (const auto& [name, array] : order) {
    const HostArray values = array->make();
    check(static_cast<bool>(values), Code::internal, "write '{}': tensor '{}' is empty", path, *name);
    check(values.shape() == array->shape, Code::internal, "write '{}': tensor '{}' is {}; expected {}", path, *name,
          to_string(values.shape()), to_string(array->shape));
    w.write(values.data(), values.bytes());
    release_pages(values.data(), values.bytes());
  }
  w.close();
}

/// Removes files of an earlier write of this stem that the new one does not use.
void remove_stale(const std::string& folder, const std::string& stem, const std::set<std::string>& current) {
  std::error_code ec;
  std::vector<fs::path> stale;
  for (const auto& f : fs::directory_iterator(folder, ec)) {
    const std::string name = f.path().filename();
    if (current.contains(name) || !name.starts_with(stem)) continue;
    const std::string rest = name.substr(stem.size());
    const bool shard = rest.size() == std::string("-00001-of-00002.safetensors").size() && rest[0] == '-' &&
                       rest.ends_with(".safetensors") && rest.substr(6, 4) == "-of-";
    if (rest == ".safetensors" || rest == ".safetensors.index.json" || shard) stale.push_back(f.path());
  }
  for (const auto& f : stale) fs::remove(f, ec);
}

}  // namespace

std::string shard_name(const std::string& stem, size_t i, size_t shards) {
  return shards == 1 ? stem + ".safetensors" : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, shards);
}

std::string shard_index(const std::map<std::string, std::string>& shard_of, int64_t bytes) {
  const Json j = {{"metadata", {{"total_size", bytes}}}, {"weight_map", shard_of}};
  return j.dump(2) + "\n";
}

ArraysToWrite to_write(const HostArrays& arrays) {
  ArraysToWrite out;
  for (const auto& [name, array] : arrays) out[name] = {array.shape(), [array = array] { return array; }};
  return out;
}

void write_safetensors(const std::string& path, const ArraysToWrite& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const WholeFile whole;
  replace_file(path, [&](const std::string& temporary) { write_plain(temporary, tensors, metadata); });
}

std::map<std::string, std::string> write_sharded_safetensors(const std::string& folder, const std::string& stem,
                                                             const ArraysToWrite& tensors, int64_t max_shard_bytes) {
  std::vector<ArraysToWrite> shards(1);
  int64_t filled = 0;
  for (const auto& [name, array] : tensors) {
    const int64_t bytes = array.shape.bytes();
    if (filled > 0 && filled + bytes > max_shard_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().emplace(name, array);
    filled += bytes;
  }
  std::map<std::string, std::string> shard_of;
  std::set<std::string> written;
  int64_t bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string& name = *written.insert(shard_name(stem, i, shards.size())).first;
    write_safetensors(fs::path(folder) / name, shards[i]);
    for (const auto& [tensor, array] : shards[i]) shard_of[tensor] = name, bytes += array.shape.bytes();
  }
  if (shards.size() > 1) {
    written.insert(stem + ".safetensors.index.json");
    write_file_atomic(fs::path(folder) / (stem + ".safetensors.index.json"), shard_index(shard_of, bytes));
  }
  remove_stale(folder, stem, written);
  return shard_of;
}

}  // namespace md
