#include "maxdiffusion/checkpoint/checksums.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kAlgorithm = "XXH3-128";

std::string_view bytes_of(const MappedFile& m, uint64_t begin, uint64_t end) {
  return {reinterpret_cast<const char*>(m.data) + begin, end - begin};
}

std::string hash_of_file(const std::string& path) {
  RunningHash all;
  read_chunks(path, kChunkBytes, [&](std::string_view part) { all.add(part); });
  return all.digest();
}

FileChecksum checksum_of_file(const std::string& path, uint64_t chunk_bytes) {
  FileChecksum sum;
  RunningHash all;
  const bool arrays = path.ends_with(".safetensors");
  read_chunks(path, chunk_bytes, [&](std::string_view chunk) {
    sum.bytes += chunk.size();
    all.add(chunk);
    if (arrays) sum.chunks.push_back(content_hash(chunk));  // the chunk is still in the processor's cache
  });
  sum.hash = all.digest();
  return sum;
}

/// checksum_of_file, once per inode: weights that no run trains are hard links in all checkpoints.
FileChecksum checksum_once(const std::string& path, uint64_t chunk_bytes) {
  struct stat s {};
  check(::stat(path.c_str(), &s) == 0, Code::io, "read '{}': no such file any more", path);
  using Identity = std::tuple<dev_t, ino_t, off_t, time_t, long, uint64_t>;
  static std::mutex mutex;
  static std::map<Identity, FileChecksum> known;
  const Identity key{s.st_dev, s.st_ino, s.st_size, s.st_mtim.tv_sec, s.st_mtim.tv_nsec, chunk_bytes};
  const std::lock_guard lock(mutex);
  FileChecksum& sum = known[key];
  if (sum.hash.empty()) sum = checksum_of_file(path, chunk_bytes);
  return sum;
}

bool is_below(const std::string& name, const std::string& part) {
  return part.empty() || name == part || name.starts_with(part + "/");
}

/// model_index.json, config.json, scheduler_config.json, …
bool is_config(const std::string& name) {
  return !name.starts_with("training_state/") && (name == "model_index.json" || name.ends_with("config.json"));
}

/// A member of an object; null if `object` is not one.
Json member(const Json& object, const char* name) { return object.is_object() ? object.value(name, Json()) : Json(); }

bool is_list_of_texts(const Json& j) {
  return j.is_array() && std::ranges::all_of(j, [](const Json& text) { return text.is_string(); });
}

}  // namespace

std::set<std::string> files_under(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& f : fs::recursive_directory_iterator(folder))
    if (f.is_regular_file()) names.insert(f.path().lexically_relative(folder).string());
  return names;
}

FileChecksums checksums_of(const std::string& folder, const std::set<std::string>& names, uint64_t chunk_bytes) {
  FileChecksums sums;
  for (const std::string& name : names) sums[name] = checksum_once(folder + "/" + name, chunk_bytes);
  return sums;
}

FileChecksum checksum_of_text(const std::string& text) { return {text.size(), content_hash(text), {}}; }

std::string to_json(const FileChecksums& files, uint64_t chunk_bytes) {
  Json list = Json::object();
  for (const auto& [name, sum] : files) {
    Json& entry = list[name] = {{"bytes", sum.bytes}, {"hash", sum.hash}};
    if (!sum.chunks.empty()) entry["chunks"] = sum.chunks;
  }
  return Json{{"algorithm", kAlgorithm}, {"chunk_bytes", chunk_bytes}, {"files", list}}.dump(1) + "\n";
}

FileChecksums parse_checksums(const std::string& text, const std::string& file, uint64_t* chunk_bytes) {
  const Json j = parse_json_or_discard(text), files = member(j, "files"), chunk = member(j, "chunk_bytes");
  check(files.is_object() && member(j, "algorithm") == kAlgorithm, Code::io,
        "read '{}': not JSON with the algorithm {} and an object 'files'", file, kAlgorithm);
  const uint64_t each = chunk.is_number_unsigned() ? chunk.get<uint64_t>() : kChunkBytes;
  check(each > 0, Code::io, "read '{}': chunks of 0 bytes", file);
  if (chunk_bytes) *chunk_bytes = each;
  FileChecksums sums;
  for (const auto& [name, recorded] : files.items()) {
    const Json bytes = member(recorded, "bytes"), hash = member(recorded, "hash"), chunks = member(recorded, "chunks");
    check(bytes.is_number_unsigned() && hash.is_string() && (chunks.is_null() || is_list_of_texts(chunks)), Code::io,
          "read '{}': the entry of '{}' is {}; expected bytes, hash and perhaps chunks", file, name, recorded.dump());
    FileChecksum& sum = sums[name] = {bytes.get<uint64_t>(), hash.get<std::string>(), {}};
    if (chunks.is_null()) continue;
    sum.chunks = chunks.get<std::vector<std::string>>();
    const uint64_t expected = sum.bytes / each + (sum.bytes % each != 0);
    check(sum.chunks.size() == expected, Code::io, "read '{}': the entry of '{}' has {} chunks; expected {}", file,
          name, sum.chunks.size(), expected);
  }
  return sums;
}

Checksums::Checksums(const std::string& folder, std::string changed_config)
    : files_(folder), changed_config_(std::move(changed_config)) {
  if (files_.size(kChecksums))
    recorded_ = parse_checksums(files_.text(kChecksums), files_.path_of(kChecksums), &chunk_bytes_);
}

Checksums::~Checksums() = default;

void Checksums::refuse(const std::string& name, const std::string& found, const std::string& expected) const {
  if (is_config(name))
    return log_line_once(LogLevel::warning, fmt::format("'{}' was changed after the checkpoint was written; {}",
                                                        files_.path_of(name), changed_config_));
  throw Error(Code::io, fmt::format("read '{}': {}; {}", files_.path_of(name), found, expected))
      .note(fmt::format("try: another checkpoint; if the change is meant, remove '{}'", files_.path_of(kChecksums)));
}

bool Checksums::verify_size(const std::string& name, const FileChecksum& recorded) const {
  const std::optional<uint64_t> size = files_.size(name);
  if (!size && !files_.remote())
    if (const auto e = unreadable_in(fs::path(files_.path_of(name)).parent_path())) throw *e;
  check(size.has_value(), Code::io, "read '{}': there is no such file; it was written with this checkpoint",
        files_.path_of(name));
  if (*size != recorded.bytes)
    refuse(name, fmt::format("it has {} bytes", *size), fmt::format("{} were written", recorded.bytes));
  return *size == recorded.bytes;
}

void Checksums::verify_file(const std::string& name, const FileChecksum& recorded) {
  if (!verify_size(name, recorded)) return;
  std::string found;
  if (!files_.remote()) {
    found = hash_of_file(files_.path_of(name));
  } else if (name.ends_with(".safetensors")) {
    fetch({{name, 0, recorded.bytes}});
    found = content_hash(bytes_of(files_.map(name), 0, recorded.bytes));
  } else {
    found = content_hash(files_.text(name));
  }
  if (found != recorded.hash)
    refuse(name, fmt::format("its bytes differ from those written: {} is {}", kAlgorithm, found),
           "expected " + recorded.hash);
}

void Checksums::verify(const std::string& part, ChecksumsOf which) {
  for (const auto& [name, recorded] : recorded_)
    if (is_below(name, part) && (which == ChecksumsOf::all || !name.ends_with(".safetensors")))
      verify_file(name, recorded);
}

void Checksums::verify_sizes(const std::string& part) const {
  for (const auto& [name, recorded] : recorded_)
    if (is_below(name, part)) verify_size(name, recorded);
}

void Checksums::warn_of_configs() {
  for (const auto& [name, recorded] : recorded_)
    if (is_config(name) && files_.size(name))
      files_.remote() ? void(verify_size(name, recorded)) : verify_file(name, recorded);
}

void Checksums::verify_bytes(const std::string& name, uint64_t begin, uint64_t end) {
  const auto found = recorded_.find(name);
  if (found == recorded_.end()) {
    if (files_.remote()) fetch({{name, begin, end}});
    bytes_read_ += end - begin;
    return;
  }
  const FileChecksum& recorded = found->second;
  end = std::min(end, recorded.bytes);
  if (begin >= end) return;
  std::vector<bool>& passed = passed_[name];
  if (passed.empty()) {
    verify_size(name, recorded);
    if (recorded.chunks.empty()) {
      verify_file(name, recorded);
      bytes_read_ += recorded.bytes;
    }
    passed.assign(std::max<size_t>(recorded.chunks.size(), 1), recorded.chunks.empty());
  }
  if (recorded.chunks.empty()) return;
  const MappedFile& map = files_.map(name);
  for (uint64_t i = begin / chunk_bytes_; i <= (end - 1) / chunk_bytes_; ++i) {
    if (passed[i]) continue;
    const uint64_t first = i * chunk_bytes_, last = first + std::min(chunk_bytes_, recorded.bytes - first);
    if (files_.remote()) fetch({{name, first, last}});
    if (const std::string hash = content_hash(bytes_of(map, first, last)); hash != recorded.chunks[i])
      refuse(
          name,
          fmt::format("its bytes differ from those written: {} of bytes {} to {} is {}", kAlgorithm, first, last, hash),
          "expected " + recorded.chunks[i]);
    bytes_read_ += last - first;
    passed[i] = true;
  }
}

void Checksums::verify_header(const std::string& name) {
  const uint64_t size = files_.size(name).value_or(0);
  uint64_t length = 0;
  if (size < sizeof length) return;
  verify_bytes(name, 0, sizeof length);
  std::memcpy(&length, files_.map(name).data, sizeof length);
  verify_bytes(name, sizeof length, length > size - sizeof length ? size : sizeof length + length);
}

void verify_checksums(const std::string& folder, const std::string& part, ChecksumsOf which) {
  Checksums(folder).verify(part, which);
}

bool matches_checksums(const std::string& path, const std::string& name, const std::string& checksums) {
  const Json recorded = member(member(parse_json_or_discard(checksums), "files"), name.c_str());
  std::error_code ec;
  return member(recorded, "bytes") == fs::file_size(path, ec) && !ec && member(recorded, "hash") == hash_of_file(path);
}

void verify_component(const std::string& path) {
  const fs::path full = fs::absolute(path).lexically_normal();
  const fs::path component = full.has_filename() ? full : full.parent_path();
  for (const fs::path& root : {component.parent_path(), component.parent_path().parent_path()})
    if (exists((root / kChecksums).string()))
      return verify_checksums(root.string(), component.lexically_relative(root).string());
}

}  // namespace md
