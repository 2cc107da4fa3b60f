#include "maxdiffusion/checkpoint/checksums.h"

#include <sys/stat.h>

#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kAlgorithm = "XXH3-128";

std::string hash_of_file(const std::string& path) {
  const MappedFile m = map_file(path);
  return content_hash({reinterpret_cast<const char*>(m.data), m.size});
}

/// hash_of_file, once for each file of the disk: weights that no run trains are links in all its checkpoints.
std::string hash_once(const std::string& path) {
  struct stat s {};
  check(::stat(path.c_str(), &s) == 0, Code::io, "read '{}': it is gone", path);
  using Identity = std::tuple<dev_t, ino_t, off_t, time_t, long>;
  static std::mutex mutex;
  static std::map<Identity, std::string> known;
  const Identity key{s.st_dev, s.st_ino, s.st_size, s.st_mtim.tv_sec, s.st_mtim.tv_nsec};
  const std::lock_guard lock(mutex);
  std::string& hash = known[key];
  if (hash.empty()) hash = hash_of_file(path);
  return hash;
}

bool is_below(const std::string& name, const std::string& part) {
  return part.empty() || name == part || name.starts_with(part + "/");
}

void verify_file(const std::string& path, const std::string& list, const Json& said) {
  const auto bytes = said.is_object() ? said.find("bytes") : said.end();
  const auto hash = said.is_object() ? said.find("hash") : said.end();
  check(bytes != said.end() && hash != said.end() && bytes->is_number_unsigned() && hash->is_string(), Code::io,
        "read '{}': the entry of '{}' is {}; expected bytes and hash", list, path, said.dump());
  const std::string hint = fmt::format("try: another checkpoint; if the change is meant, remove '{}'", list);
  std::error_code ec;
  const auto size = fs::file_size(path, ec);
  if (ec) throw Error(Code::io, fmt::format("read '{}': {}; it was written with this checkpoint", path, ec.message()));
  if (size != bytes->get<uint64_t>())
    throw Error(Code::io, fmt::format("read '{}': it has {} bytes; {} were written", path, size, bytes->dump()))
        .note(hint);
  if (const std::string found = hash_of_file(path); found != hash->get<std::string>())
    throw Error(Code::io, fmt::format("read '{}': its bytes are not those that were written: {} is {}, expected {}",
                                      path, kAlgorithm, found, hash->get<std::string>()))
        .note(hint);
}

}  // namespace

std::string checksums_of(const std::string& folder, const std::map<std::string, std::string>& more) {
  Json files = Json::object();
  for (const auto& f : fs::recursive_directory_iterator(folder))
    if (f.is_regular_file())
      files[fs::relative(f.path(), folder).string()] = {{"bytes", f.file_size()}, {"hash", hash_once(f.path())}};
  for (const auto& [name, text] : more) files[name] = {{"bytes", text.size()}, {"hash", content_hash(text)}};
  return Json{{"algorithm", kAlgorithm}, {"files", files}}.dump(1) + "\n";
}

void verify_checksums(const std::string& folder, const std::string& part, ChecksumsOf which) {
  const std::string list = (fs::path(folder) / kChecksums).string();
  if (!exists(list)) return;
  const Json j = Json::parse(read_file(list), nullptr, false);
  const auto files = j.is_object() ? j.find("files") : j.end();
  check(files != j.end() && files->is_object() && j.value("algorithm", Json()) == kAlgorithm, Code::io,
        "read '{}': not JSON with the algorithm {} and an object 'files'", list, kAlgorithm);
  for (const auto& [name, said] : files->items())
    if (is_below(name, part) && (which == ChecksumsOf::all || !name.ends_with(".safetensors")))
      verify_file((fs::path(folder) / name).string(), list, said);
}

bool is_as_said(const std::string& path, const std::string& name, const std::string& checksums) {
  const Json j = Json::parse(checksums, nullptr, false);
  const auto files = j.is_object() ? j.find("files") : j.end();
  if (files == j.end() || !files->is_object() || !files->contains(name)) return false;
  try {
    verify_file(path, kChecksums, files->at(name));
    return true;
  } catch (const Error&) {
    return false;
  }
}

void verify_component(const std::string& path) {
  const fs::path full = fs::absolute(path).lexically_normal();
  const fs::path component = full.has_filename() ? full : full.parent_path();
  for (const fs::path& root : {component.parent_path(), component.parent_path().parent_path()})
    if (exists((root / kChecksums).string()))
      return verify_checksums(root.string(), component.lexically_relative(root).string());
}

}  // namespace md
