#include "maxdiffusion/checkpoint/checksums.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kAlgorithm = "XXH3-128";

struct FileHash {
  std::string whole;
  std::vector<std::string> chunks;
};

std::string_view bytes_of(const MappedFile& m, uint64_t begin, uint64_t end) {
  return {reinterpret_cast<const char*>(m.data) + begin, end - begin};
}

std::string hash_of_file(const std::string& path) {
  const MappedFile m = map_file(path);
  return content_hash(bytes_of(m, 0, m.size));
}

FileHash hashes_of_file(const std::string& path, uint64_t chunk_bytes) {
  if (!path.ends_with(".safetensors")) return {hash_of_file(path), {}};
  const MappedFile m = map_file(path);
  FileHash hash;
  RunningHash all;
  for (uint64_t at = 0; at < m.size; at += chunk_bytes) {
    const std::string_view chunk = bytes_of(m, at, std::min<uint64_t>(m.size, at + chunk_bytes));
    all.add(chunk);
    hash.chunks.push_back(content_hash(chunk));  // while it is in the processor's cache
  }
  hash.whole = all.digest();
  return hash;
}

/// hashes_of_file, once for each file of the disk: weights that no run trains are links in all its checkpoints.
FileHash hash_once(const std::string& path, uint64_t chunk_bytes) {
  struct stat s {};
  check(::stat(path.c_str(), &s) == 0, Code::io, "read '{}': it is gone", path);
  using Identity = std::tuple<dev_t, ino_t, off_t, time_t, long, uint64_t>;
  static std::mutex mutex;
  static std::map<Identity, FileHash> known;
  const Identity key{s.st_dev, s.st_ino, s.st_size, s.st_mtim.tv_sec, s.st_mtim.tv_nsec, chunk_bytes};
  const std::lock_guard lock(mutex);
  FileHash& hash = known[key];
  if (hash.whole.empty()) hash = hashes_of_file(path, chunk_bytes);
  return hash;
}

bool is_below(const std::string& name, const std::string& part) {
  return part.empty() || name == part || name.starts_with(part + "/");
}

/// Of an object; of none where it is something else.
Json member(const Json& object, const char* name) { return object.is_object() ? object.value(name, Json()) : Json(); }

bool is_list_of_texts(const Json& j) {
  return j.is_array() && std::ranges::all_of(j, [](const Json& text) { return text.is_string(); });
}

}  // namespace

std::string checksums_of(const std::string& folder, const std::map<std::string, std::string>& more,
                         uint64_t chunk_bytes) {
  Json files = Json::object();
  for (const auto& f : fs::recursive_directory_iterator(folder)) {
    if (!f.is_regular_file()) continue;
    const FileHash hash = hash_once(f.path(), chunk_bytes);
    Json& entry = files[fs::relative(f.path(), folder).string()];
    entry = {{"bytes", f.file_size()}, {"hash", hash.whole}};
    if (!hash.chunks.empty()) entry["chunks"] = hash.chunks;
  }
  for (const auto& [name, text] : more) files[name] = {{"bytes", text.size()}, {"hash", content_hash(text)}};
  return Json{{"algorithm", kAlgorithm}, {"chunk_bytes", chunk_bytes}, {"files", files}}.dump(1) + "\n";
}

Checksums::Checksums(const std::string& folder) : folder_(folder), list_((fs::path(folder) / kChecksums).string()) {
  if (!exists(list_)) return;
  const Json j = Json::parse(read_file(list_), nullptr, false), files = member(j, "files"),
             chunk = member(j, "chunk_bytes");
  check(files.is_object() && member(j, "algorithm") == kAlgorithm, Code::io,
        "read '{}': not JSON with the algorithm {} and an object 'files'", list_, kAlgorithm);
  if (chunk.is_number_unsigned()) chunk_bytes_ = chunk.get<uint64_t>();
  check(chunk_bytes_ > 0, Code::io, "read '{}': chunks of 0 bytes", list_);
  for (const auto& [name, said] : files.items()) {
    const Json bytes = member(said, "bytes"), hash = member(said, "hash"), chunks = member(said, "chunks");
    check(bytes.is_number_unsigned() && hash.is_string() && (chunks.is_null() || is_list_of_texts(chunks)), Code::io,
          "read '{}': the entry of '{}' is {}; expected bytes, hash and perhaps chunks", list_, path_of(name),
          said.dump());
    File& file = files_[name];
    file = {bytes.get<uint64_t>(), hash.get<std::string>(), {}, {}, {}};
    if (chunks.is_null()) continue;
    file.chunks = chunks.get<std::vector<std::string>>();
    const uint64_t expected = file.bytes / chunk_bytes_ + (file.bytes % chunk_bytes_ != 0);
    check(file.chunks.size() == expected, Code::io, "read '{}': the entry of '{}' has {} chunks; expected {}", list_,
          path_of(name), file.chunks.size(), expected);
  }
}

Checksums::~Checksums() = default;

void Checksums::refuse(const std::string& path, const std::string& found, const std::string& expected) const {
  throw Error(Code::io, fmt::format("read '{}': {}; {}", path, found, expected))
      .note(fmt::format("try: another checkpoint; if the change is meant, remove '{}'", list_));
}

void Checksums::verify_size(const std::string& name, const File& file) const {
  std::error_code ec;
  const auto size = fs::file_size(path_of(name), ec);
  if (ec)
    throw Error(Code::io,
                fmt::format("read '{}': {}; it was written with this checkpoint", path_of(name), ec.message()));
  if (size != file.bytes)
    refuse(path_of(name), fmt::format("it has {} bytes", size), fmt::format("{} were written", file.bytes));
}

void Checksums::verify_file(const std::string& name, const File& file) const {
  verify_size(name, file);
  if (const std::string found = hash_of_file(path_of(name)); found != file.hash)
    refuse(path_of(name), fmt::format("its bytes are not those that were written: {} is {}", kAlgorithm, found),
           "expected " + file.hash);
}

void Checksums::verify(const std::string& part, ChecksumsOf which) const {
  for (const auto& [name, file] : files_)
    if (is_below(name, part) && (which == ChecksumsOf::all || !name.ends_with(".safetensors"))) verify_file(name, file);
}

void Checksums::verify_sizes(const std::string& part) const {
  for (const auto& [name, file] : files_)
    if (is_below(name, part)) verify_size(name, file);
}

void Checksums::verify_bytes(const std::string& name, uint64_t begin, uint64_t end) {
  const auto found = files_.find(name);
  if (found == files_.end()) {
    bytes_read_ += end - begin;
    return;
  }
  File& file = found->second;
  end = std::min(end, file.bytes);
  if (begin >= end) return;
  if (file.passed.empty()) {
    verify_size(name, file);
    file.map = map_file(path_of(name));
    if (file.chunks.empty()) {
      verify_file(name, file);
      bytes_read_ += file.bytes;
    }
    file.passed.assign(std::max<size_t>(file.chunks.size(), 1), file.chunks.empty());
  }
  if (file.chunks.empty()) return;
  for (uint64_t i = begin / chunk_bytes_; i <= (end - 1) / chunk_bytes_; ++i) {
    if (file.passed[i]) continue;
    const uint64_t first = i * chunk_bytes_, last = std::min(file.bytes, first + chunk_bytes_);
    if (const std::string hash = content_hash(bytes_of(file.map, first, last)); hash != file.chunks[i])
      refuse(path_of(name),
             fmt::format("its bytes are not those that were written: {} of bytes {} to {} is {}", kAlgorithm, first,
                         last, hash),
             "expected " + file.chunks[i]);
    bytes_read_ += last - first;
    file.passed[i] = true;
  }
}

void Checksums::verify_header(const std::string& name) {
  const auto found = files_.find(name);
  if (found == files_.end() || found->second.bytes < sizeof(uint64_t)) return;
  verify_bytes(name, 0, sizeof(uint64_t));
  uint64_t length = 0;
  std::memcpy(&length, found->second.map.data, sizeof length);
  verify_bytes(name, 0, length > found->second.bytes ? found->second.bytes : sizeof length + length);
}

void verify_checksums(const std::string& folder, const std::string& part, ChecksumsOf which) {
  Checksums(folder).verify(part, which);
}

bool is_as_said(const std::string& path, const std::string& name, const std::string& checksums) {
  const Json said = member(member(Json::parse(checksums, nullptr, false), "files"), name.c_str());
  std::error_code ec;
  return member(said, "bytes") == fs::file_size(path, ec) && !ec && member(said, "hash") == hash_of_file(path);
}

void verify_component(const std::string& path) {
  const fs::path full = fs::absolute(path).lexically_normal();
  const fs::path component = full.has_filename() ? full : full.parent_path();
  for (const fs::path& root : {component.parent_path(), component.parent_path().parent_path()})
    if (exists((root / kChecksums).string()))
      return verify_checksums(root.string(), component.lexically_relative(root).string());
}

}  // namespace md
