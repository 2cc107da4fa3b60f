// The reading side: a header is a claim about the file, and every claim is checked before a byte is used.
// The writing side is safetensors_writer.cc.
#include "maxdiffusion/checkpoint/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/parse_unique_json.h"
#include "maxdiffusion/checkpoint/gguf.h"
#include "maxdiffusion/checkpoint/safetensors_dtype.h"
#include "maxdiffusion/checkpoint/shard_files.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian and are used as they lie");

constexpr uint64_t kMaxHeader = 100'000'000;  // the reference implementation's limit, bytes
constexpr size_t kLengthBytes = 8;

constexpr const char* kDamaged = "try: fetch or write the file again; it is damaged or is not a safetensors file";

[[noreturn]] void refuse(const std::string& file, const std::string& what) {
  throw Error(Code::io, fmt::format("read '{}': {}", file, what)).note(kDamaged);
}

/// Throws if a file begins with letters; a safetensors file begins with a header length, which ends in zeros.
void refuse_others(const std::string& file, std::string_view begin) {
  const auto letter = [](char c) { return (c >= ' ' && c <= '~') || c == '\n' || c == '\r' || c == '\t'; };
  if (!std::ranges::all_of(begin.substr(0, kLengthBytes), letter)) return;
  if (begin.starts_with("version https://git-lfs"))
    throw Error(Code::io, fmt::format("read '{}': a git-lfs pointer; expected the file itself", file))
        .note("try: git lfs pull, in the folder that was cloned");
  std::string first(begin.substr(0, begin.find_first_of("\r\n")));
  std::string lower = first;
  std::ranges::transform(lower, lower.begin(), [](char c) { return static_cast<char>(std::tolower(c)); });
  if (lower.starts_with("<!doctype html") || lower.starts_with("<html"))
    throw Error(Code::io, fmt::format("read '{}': an HTML page; expected safetensors", file))
        .note("try: the address of the file's download button");
  fail(Code::io, "read '{}': a text that begins with '{}'; expected safetensors", file, first);
}

/// The JSON of a header or an index, in whose objects at a depth of at most `unique_depth` no key stands twice.
Json parse_unique(const std::string& file, std::string_view text, int unique_depth) {
  try {
    return parse_unique_json(text, unique_depth);
  } catch (const Error& e) {
    refuse(file, fmt::format("the header: {}", e.message()));
  } catch (const Json::exception& e) {
    refuse(file, fmt::format("the header is not JSON: {}", e.what()));
  }
}

uint64_t whole_number(const std::string& file, const std::string& tensor, const Json& j, const char* what) {
  if (!j.is_number_unsigned())
    refuse(file, fmt::format("tensor '{}': {} is {}, not a whole number of 0 or more", tensor, what, j.dump()));
  return j.get<uint64_t>();
}

struct Entry {
  std::string name;
  Shape shape;
  uint64_t begin = 0, end = 0;  // bytes from the start of the data
};

Entry parse_entry(const std::string& file, const std::string& name, const Json& j) {
  Entry e{.name = name};
  if (!j.is_object()) refuse(file, fmt::format("tensor '{}': its header entry is {}, not an object", name, j.dump()));
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!j.contains(key)) refuse(file, fmt::format("tensor '{}': its header entry has no '{}'", name, key));
  const Json &dtype = j["dtype"], &shape = j["shape"], &offsets = j["data_offsets"];
  if (!dtype.is_string()) refuse(file, fmt::format("tensor '{}': dtype is {}, not a text", name, dtype.dump()));
  e.shape.dtype = safetensors_dtype(file, name, dtype.get<std::string>(), kDamaged);
  if (!shape.is_array()) refuse(file, fmt::format("tensor '{}': shape is {}, not a list", name, shape.dump()));
  uint64_t bytes = size_of(e.shape.dtype);
  for (const Json& d : shape) {
    uint64_t n = whole_number(file, name, d, "a size in shape");
    if (n > INT64_MAX || __builtin_mul_overflow(bytes, n, &bytes) || bytes > INT64_MAX)
      refuse(file, fmt::format("tensor '{}': shape {} does not fit into memory", name, shape.dump()));
    e.shape.dims.push_back(static_cast<int64_t>(n));
  }
  if (!offsets.is_array() || offsets.size() != 2)
    refuse(file, fmt::format("tensor '{}': data_offsets is {}, not [begin, end]", name, offsets.dump()));
  e.begin = whole_number(file, name, offsets[0], "data_offsets");
  e.end = whole_number(file, name, offsets[1], "data_offsets");
  if (e.end < e.begin || e.end - e.begin != bytes)
    refuse(file, fmt::format("tensor '{}': {} {} takes {} bytes, but data_offsets [{}, {}] do not span that", name,
                             dtype.get<std::string>(), shape.dump(), bytes, e.begin, e.end));
  return e;
}

/// Tensors must cover the data without gap or overlap, to the last byte, as the reference implementation requires.
void check_layout(const std::string& file, std::vector<Entry>& entries, uint64_t data_bytes) {
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t at = 0;
  for (const Entry& e : entries) {
    if (e.end > data_bytes)
      refuse(file, fmt::format("truncated: tensor '{}' ends at byte {} of the data, but the file holds {}", e.name,
                               e.end, data_bytes));
    if (e.begin < at)
      refuse(file, fmt::format("tensor '{}' at bytes [{}, {}] overlaps the one before it, which ends at {}", e.name,
                               e.begin, e.end, at));
    if (e.begin > at)
      refuse(file, fmt::format("tensor '{}' begins at byte {}, leaving a hole after byte {}", e.name, e.begin, at));
    at = e.end;
  }
  if (at != data_bytes)
    refuse(file, fmt::format("{} bytes follow the last tensor, which ends at byte {}", data_bytes - at, at));
}

/// ComfyUI marks quantized modules by tensors MODULE.comfy_quant, or by the same objects in the metadata: these as
/// tensors, so that readers know one form.
HostArrays marks_of(const std::string& file, const std::map<std::string, std::string>& metadata) {
  HostArrays out;
  const auto found = metadata.find("_quantization_metadata");
  if (found == metadata.end()) return out;
  const Json marks = parse_json_or_discard(found->second);
  const auto layers = marks.is_object() ? marks.find("layers") : marks.end();
  if (!marks.is_object() || layers == marks.end() || !layers->is_object())
    refuse(file, fmt::format("_quantization_metadata is {}; expected a JSON object with 'layers'", found->second));
  for (const auto& [module, mark] : layers->items()) {
    const std::string text = mark.dump();
    HostArray bytes({DType::u8, {static_cast<int64_t>(text.size())}});
    std::memcpy(bytes.mutable_data(), text.data(), text.size());
    out.emplace(module + ".comfy_quant", std::move(bytes));
  }
  return out;
}

}  // namespace

struct SafetensorsReader::OneFile {
  HostArrays tensors;
  std::map<std::string, std::string> metadata;
  std::map<std::string, uint64_t> offsets;
};

SafetensorsReader::OneFile SafetensorsReader::read_one(const std::string& file, const MappedFile& m) {
  if (is_gguf(m)) {
    GgufContent content = read_gguf(file, m);
    return {std::move(content.tensors), std::move(content.metadata), std::move(content.offsets)};
  }
  if (m.size < kLengthBytes) refuse(file, fmt::format("truncated: {} bytes hold no header length", m.size));
  refuse_others(file, {reinterpret_cast<const char*>(m.data), std::min<size_t>(m.size, 64)});
  uint64_t header = 0;
  std::memcpy(&header, m.data, kLengthBytes);
  if (header > kMaxHeader)
    refuse(file, fmt::format("header of {} bytes is over the limit of {} bytes", header, kMaxHeader));
  if (header > m.size - kLengthBytes)
    refuse(file, fmt::format("truncated: header of {} bytes in a file of {} bytes", header, m.size));
  std::string_view text(reinterpret_cast<const char*>(m.data) + kLengthBytes, header);
  if (text.empty() || text[0] != '{') refuse(file, "the header does not begin with '{'");
  Json j = parse_unique(file, text, 1);

  OneFile out;
  std::vector<Entry> entries;
  for (const auto& [name, value] : j.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(file, name, value));
      continue;
    }
    if (!value.is_object()) refuse(file, "__metadata__ is not an object");
    for (const auto& [k, v] : value.items()) {
      if (!v.is_string()) refuse(file, fmt::format("__metadata__ '{}' is {}, not a text", k, v.dump()));
      out.metadata[k] = v.get<std::string>();
    }
  }
  check_layout(file, entries, m.size - kLengthBytes - header);
  const std::byte* data = m.data + kLengthBytes + header;
  for (Entry& e : entries) {
    const std::byte* at = data + e.begin;
    out.offsets.emplace(e.name, kLengthBytes + header + e.begin);
    if (reinterpret_cast<uintptr_t>(at) % size_of(e.shape.dtype) == 0) {
      out.tensors.emplace(e.name, HostArray(std::move(e.shape), m.owner, at));
    } else {  // writers before 0.3 did not align the data; typed views require it
      HostArray copy(std::move(e.shape));
      std::memcpy(copy.mutable_data(), at, copy.bytes());
      out.tensors.emplace(e.name, std::move(copy));
    }
  }
  for (auto& [name, mark] : marks_of(file, out.metadata))
    if (out.tensors.emplace(name, std::move(mark)).second) out.offsets.emplace(name, kLengthBytes);  // in the header
  return out;
}

namespace {

std::map<std::string, std::string> read_weight_map(const std::string& file) {
  std::string text = read_file(file);
  Json j = parse_unique(file, text, 2);
  auto found = j.is_object() ? j.find("weight_map") : j.end();
  if (found == j.end() || !found->is_object()) refuse(file, "the index has no 'weight_map'");
  std::map<std::string, std::string> shard_of;
  for (const auto& [name, shard] : found->items()) {
    if (!shard.is_string())
      refuse(file, fmt::format("the index gives {} for '{}', not a file name", shard.dump(), name));
    auto s = shard.get<std::string>();
    // Shards must be in the index's folder: otherwise an index could name any file of this machine.
    if (s.empty() || s == "." || s == ".." || s.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
      refuse(file, fmt::format("the index gives '{}' for '{}'; expected a file in the folder of the index", s, name));
    shard_of[name] = s;
  }
  return shard_of;
}

bool ends_with(const std::string& s, std::string_view end) {
  return s.size() >= end.size() && std::string_view(s).substr(s.size() - end.size()) == end;
}

/// Whether the name is that of a pickle file, which only Python reads.
bool is_pickled(const std::string& file) {
  return std::ranges::any_of(std::array{".pth", ".pt", ".ckpt", ".bin"},
                             [&](auto end) { return ends_with(file, end); });
}
std::string conversion_of(const std::string& file) {
  return fmt::format(
      "try: convert it in Python, with save_pretrained of diffusers or safetensors.torch.save_file(torch.load('{}', "
      "map_location='cpu', weights_only=True), 'NAME.safetensors'); of a whole model's .ckpt save the member "
      "'state_dict', without what is not a tensor",
      file);
}

constexpr std::string_view kStems[] = {"diffusion_pytorch_model", "model"};

/// The variant in the name of an unsharded weights file or of an index: "fp16" for "model.fp16.safetensors" and
/// "model.safetensors.index.fp16.json". Empty for names without variant and for single shards.
std::string variant_of(const std::string& name) {
  for (std::string_view stem : kStems) {
    if (!name.starts_with(stem)) continue;
    const std::string rest = name.substr(stem.size());
    for (const auto& [begin, end] : {std::pair<std::string_view, std::string_view>{".safetensors.index.", ".json"},
                                     {".", ".safetensors.index.json"},
                                     {".", ".safetensors"}}) {
      if (!rest.starts_with(begin) || !rest.ends_with(end) || rest.size() <= begin.size() + end.size()) continue;
      std::string variant = rest.substr(begin.size(), rest.size() - begin.size() - end.size());
      if (variant.find_first_of(".-") == std::string::npos) return variant;
    }
  }
  return "";
}

/// The error of a file that does not exist, and how to get it. A link to nothing is that of an interrupted download:
/// the Hugging Face cache has links in snapshots/ to its blobs/.
Error incomplete(Error e, const std::string& file) {
  std::error_code ec;
  if (const fs::path to = fs::read_symlink(file, ec); !ec)
    e.note(fmt::format("'{}' is a link to '{}', which does not exist: its download is incomplete", file, to.string()));
  return e.note("try: download the model again; files that are whole are kept");
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(folder, ec)) names.push_back(f.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// The weights file in a folder. Throws an error that says what the folder holds instead.
std::string find_in_folder(const std::string& folder) {
  for (std::string_view stem : kStems)
    for (const char* suffix : {".safetensors", ".safetensors.index.json"})
      if (auto p = fs::path(folder) / (std::string(stem) + suffix); exists(p)) return p;
  const std::vector<std::string> names = names_in(folder);
  std::set<std::string> variants;
  for (const std::string& name : names)
    if (const std::string variant = variant_of(name); !variant.empty()) variants.insert(variant);
  check(variants.size() < 2, Code::io,
        "read '{}': the folder holds weights of the variants {} and no plain ones; expected one of them in variant=",
        folder, fmt::join(variants, ", "));
  std::vector<std::string> gguf;
  for (const std::string& name : names)
    if (ends_with(name, ".gguf")) gguf.push_back(name);
  check(gguf.size() < 2, Code::io, "read '{}': the folder holds {}; expected one of them", folder,
        fmt::join(gguf, ", "));
  if (!gguf.empty()) return fs::path(folder) / gguf[0];
  if (!variants.empty()) {
    log_info("'{}' holds weights of the variant {} only; these are used", folder, *variants.begin());
    return file_of_variant(folder, *variants.begin());
  }
  Error e(Code::io, fmt::format("read '{}': the folder holds no diffusion_pytorch_model.safetensors, "
                                "model.safetensors or an index of one",
                                folder));
  for (const std::string& name : names)
    if (ends_with(name, ".safetensors") && !exists(folder + "/" + name)) throw incomplete(e, folder + "/" + name);
  auto first = [&](auto&& is) { return std::find_if(names.begin(), names.end(), is); };
  if (const fs::path checkpoint = fs::path(folder).parent_path(); exists(checkpoint / kIndex))
    throw e.note(
        fmt::format("several processes wrote '{0}' in shards; try: {1} convert {0} FOLDER, which makes it a "
                    "model folder",
                    checkpoint.string(), program_name()));
  if (auto f = first([](auto& s) { return s == "model_index.json"; }); f != names.end()) {
    e.note("try: this is a whole pipeline; name one of its folders, such as unet, vae or text_encoder");
  } else if (f = first([](auto& s) { return ends_with(s, ".safetensors") || ends_with(s, ".safetensors.index.json"); });
             f != names.end()) {
    e.note(fmt::format("try: the path of '{}' itself", *f));
  } else if (f = first([](auto& s) { return is_pickled(s) || ends_with(s, ".msgpack"); }); f != names.end()) {
    e.note(fmt::format("it holds '{}', which is not supported", *f)).note(conversion_of(folder + "/" + *f));
  } else {
    e.note(names.empty() ? std::string("found: nothing")
                         : fmt::format("found: {}", fmt::join(names.begin(),
                                                              names.begin() + std::min<long>(names.size(), 10), ", ")));
  }
  throw e;
}

}  // namespace

std::string file_of_variant(const std::string& folder, const std::string& variant) {
  for (const std::string& name : names_in(folder))
    if (!variant.empty() && variant_of(name) == variant) return fs::path(folder) / name;
  return "";
}

bool has_variant(const std::string& file) {
  const std::string name = fs::path(file).filename();
  return std::ranges::none_of(kStems, [&](std::string_view stem) {
    const std::string rest = name.starts_with(stem) ? name.substr(stem.size()) : ".other";
    return rest.starts_with(".safetensors")
               ? !rest.starts_with(".safetensors.index.") || rest == ".safetensors.index.json"
               : rest.starts_with("-");
  });
}

SafetensorsReader SafetensorsReader::open(const std::string& path) {
  SafetensorsReader r;
  std::error_code ec;
  const std::string file = fs::is_directory(path, ec) ? find_in_folder(path) : path;
  if (fs::is_symlink(file, ec) && !exists(file))
    throw incomplete(Error(Code::io, fmt::format("read '{}': there is no such file", file)), file);
  if (is_pickled(file) && exists(file))
    throw Error(Code::io, fmt::format("read '{}': a pickled file; expected safetensors", file))
        .note(conversion_of(file));
  if (!ends_with(file, ".json")) return of(file, map_file(file));
  std::map<std::string, OneFile> shards;
  for (const auto& [name, shard] : read_weight_map(file)) {
    const std::string shard_path = fs::path(file).parent_path() / shard;
    auto it = shards.find(shard);
    if (it == shards.end()) {
      if (!exists(shard_path))
        throw incomplete(
            Error(Code::io, fmt::format("read '{}': the index names shard '{}', which is missing", file, shard)),
            shard_path);
      it = shards.emplace(shard, read_one(shard_path, map_file(shard_path))).first;
      r.metadata_.insert(it->second.metadata.begin(), it->second.metadata.end());
    }
    auto tensor = it->second.tensors.find(name);
    if (tensor == it->second.tensors.end())
      refuse(file, fmt::format("the index says that '{}' is in '{}', but that shard does not hold it", name, shard));
    r.tensors_.emplace(name, tensor->second);
    r.files_[name] = shard_path;
    r.offsets_[name] = it->second.offsets.at(name);
  }
  for (const auto& [shard, one] : shards)
    for (const auto& [name, array] : one.tensors)
      if (!r.tensors_.contains(name) && one.offsets.at(name) == kLengthBytes) {  // a mark of the metadata
        r.tensors_.emplace(name, array);
        r.files_[name] = fs::path(file).parent_path() / shard;
        r.offsets_[name] = kLengthBytes;
      } else if (!r.tensors_.contains(name)) {
        refuse(file, fmt::format("shard '{}' holds '{}', which the index does not name", shard, name));
      }
  return r;
}

SafetensorsReader SafetensorsReader::of(const std::string& name, const MappedFile& file) {
  OneFile one = read_one(name, file);
  SafetensorsReader r;
  for (const auto& [tensor, array] : one.tensors) r.files_[tensor] = name;
  r.tensors_ = std::move(one.tensors);
  r.metadata_ = std::move(one.metadata);
  r.offsets_ = std::move(one.offsets);
  return r;
}

const std::string& SafetensorsReader::file_of(const std::string& tensor) const {
  auto it = files_.find(tensor);
  check(it != files_.end(), Code::internal, "safetensors: no tensor '{}'", tensor);
  return it->second;
}

uint64_t SafetensorsReader::offset_of(const std::string& tensor) const {
  auto it = offsets_.find(tensor);
  check(it != offsets_.end(), Code::internal, "safetensors: no tensor '{}'", tensor);
  return it->second;
}

}  // namespace md
