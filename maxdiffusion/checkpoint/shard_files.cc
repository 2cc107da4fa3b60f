#include "maxdiffusion/checkpoint/shard_files.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors_dtype.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

[[noreturn]] void refuse(const std::string& file, const std::string& array, const std::string& what) {
  fail(Code::io, "read '{}': array '{}': {}", file, array, what);
}

std::vector<int64_t> whole_numbers(const std::string& file, const std::string& array, const Json& list) {
  std::vector<int64_t> out;
  for (const Json& n : list) {
    if (!n.is_number_unsigned() || n.get<uint64_t>() > INT64_MAX)
      refuse(file, array, fmt::format("{} is not a whole number of 0 or more", n.dump()));
    out.push_back(n.get<int64_t>());
  }
  return out;
}

IndexedArray parse_array(const std::string& file, const std::string& name, const Json& j) {
  try {
    IndexedArray a;
    a.shape = {safetensors_dtype(file, name, j.at("dtype").get<std::string>(), ""),
               whole_numbers(file, name, j.at("shape"))};
    auto bytes = static_cast<int64_t>(size_of(a.shape.dtype));
    for (int64_t d : a.shape.dims)
      if (__builtin_mul_overflow(bytes, d, &bytes))
        refuse(file, name, fmt::format("shape {} does not fit into memory", to_string(a.shape)));
    for (const Json& p : j.at("pieces")) {
      FileShard shard{{whole_numbers(file, name, p.at("offset")), whole_numbers(file, name, p.at("size"))},
                      p.at("file").get<std::string>(),
                      p.at("tensor").get<std::string>()};
      if (const size_t rank = a.shape.dims.size(); shard.slice.start.size() != rank || shard.slice.size.size() != rank)
        refuse(file, name,
               fmt::format("a shard at {} of sizes {}; expected {} numbers each", p.at("offset").dump(),
                           p.at("size").dump(), rank));
      const fs::path path(shard.file);
      bool inside = path.is_relative() && !shard.file.empty();
      for (const auto& part : path) inside = inside && part != "..";
      if (!inside) refuse(file, name, fmt::format("'{}' is not a file inside the checkpoint", shard.file));
      a.shards.push_back(std::move(shard));
    }
    return a;
  } catch (const Json::exception& e) {
    refuse(file, name, e.what());
  }
}

}  // namespace

std::string shard_file(int64_t process, int64_t processes) {
  return fmt::format("training_state/pieces-{:05}-of-{:05}.safetensors", process, processes);
}

std::string tensor_of_shard(const std::string& array, const Slice& slice) {
  return fmt::format("{}@{}", array, fmt::join(slice.start, ","));
}

std::string to_json(const ShardIndex& index) {
  Json arrays = Json::object();
  for (const auto& [name, a] : index) {
    Json shards = Json::array();
    for (const FileShard& p : a.shards)
      shards.push_back({{"file", p.file}, {"tensor", p.tensor}, {"offset", p.slice.start}, {"size", p.slice.size}});
    arrays[name] = {{"dtype", kSafetensorsDTypes[safetensors_rank(a.shape.dtype)].name},
                    {"shape", a.shape.dims},
                    {"pieces", shards}};
  }
  return Json{{"arrays", arrays}}.dump(1) + "\n";
}

ShardIndex parse_index(const std::string& text, const std::string& file) {
  ShardIndex index;
  const Json j = parse_json_or_discard(text);
  const auto arrays = j.is_object() ? j.find("arrays") : j.end();
  check(arrays != j.end() && arrays->is_object(), Code::io, "read '{}': not JSON with an object 'arrays'", file);
  for (const auto& [name, entry] : arrays->items()) index[name] = parse_array(file, name, entry);
  return index;
}

void merge_index(ShardIndex& into, const ShardIndex& from, const std::string& file) {
  for (const auto& [name, a] : from) {
    auto [merged, added] = into.try_emplace(name, a);
    if (added) continue;
    if (merged->second.shape != a.shape)
      refuse(file, name, fmt::format("it is {}, elsewhere {}", to_string(a.shape), to_string(merged->second.shape)));
    merged->second.shards.insert(merged->second.shards.end(), a.shards.begin(), a.shards.end());
  }
}

void check_tiled(const ShardIndex& index, const std::string& act) {
  for (const auto& [name, a] : index) {
    std::vector<Slice> slices;
    for (const FileShard& p : a.shards) slices.push_back(p.slice);
    const std::string fault = tiling_fault(a.shape.dims, slices);
    check(fault.empty(), Code::io, "{}: array '{}': {}", act, name, fault);
  }
}

std::string array_of_weight(const std::string& component, const std::string& weight) {
  return "weights/" + component + "/" + weight;
}

}  // namespace md
