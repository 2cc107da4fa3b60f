#include "maxdiffusion/storage/storage.h"

#include <fnmatch.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/storage/links.h"
#include "maxdiffusion/storage/remote_library.h"

namespace md {
namespace {

namespace fs = std::filesystem;

class LocalFile : public InputFile {
 public:
  explicit LocalFile(const std::string& path) : name_(path), map_(map_file(path)) {}
  const std::string& name() const override { return name_; }
  int64_t size() const override { return static_cast<int64_t>(map_.size); }
  Blob read(int64_t offset, int64_t size) const override {
    check(offset >= 0 && size >= 0 && offset <= this->size() && size <= this->size() - offset, Code::io,
          "{}: the file is truncated: bytes {} to {} of {} are needed", name_, offset, offset + size, this->size());
    return {map_.owner, {reinterpret_cast<const char*>(map_.data) + offset, static_cast<size_t>(size)}};
  }
  bool local() const override { return true; }

 private:
  std::string name_;
  MappedFile map_;
};

size_t first_wildcard(const std::string& path) { return path.find_first_of("*?["); }

FoundFile local_file(const fs::path& path) {
  struct stat s {};
  ::stat(path.c_str(), &s);
  const auto ns = [](const timespec& t) { return t.tv_sec * 1'000'000'000 + t.tv_nsec; };
  return {path.string(), s.st_size, ns(s.st_mtim), ns(s.st_ctim)};
}

bool hidden(const std::string& relative) {
  return relative.starts_with('.') || relative.find("/.") != std::string::npos;
}

void check_scheme(const std::string& location) {
  check(is_remote(location) || location.find("://") == std::string::npos, Code::io,
        "'{}': files are read from folders of this machine, gs:// and s3://", shown(location));
}

bool is_inside(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

/// Why a link below a folder is not followed; empty: it is followed. `out`: also to what is not in the folder.
std::string fault_of_link(const fs::path& link, const fs::path& folder, bool out) {
  std::error_code ec;
  const fs::path to = fs::canonical(link, ec);
  if (ec) return "it leads nowhere";
  const bool inside = is_inside(to, folder);
  if (!inside && out) return "";
  if (fs::is_directory(to, ec))
    return inside ? "it leads to a folder that is read anyway" : fmt::format("it leads to '{}'", to.string());
  // models--owner--name/snapshots/revision/file is a link to models--owner--name/blobs/hash.
  for (fs::path p = folder; !inside && p.has_relative_path(); p = p.parent_path())
    if (p.parent_path().filename() == "snapshots" && is_inside(to, p.parent_path().parent_path() / "blobs")) return "";
  return inside ? "" : fmt::format("it leads to '{}'", to.string());
}

// Lists files, unsorted. Without `left_out`, all links are followed.
std::vector<FoundFile> walk(const std::string& location, SkippedLinks* left_out = nullptr, bool out_of_folder = false) {
  std::vector<FoundFile> found;
  check_scheme(location);
  if (is_remote(location)) {
    found = remote_library().list(location, true);
    const size_t root = split_location(location).path.size();
    std::erase_if(found, [&](const FoundFile& f) {
      const std::string path = split_location(f.location).path;
      return path.size() > root && hidden(path.substr(path[root] == '/' ? root + 1 : root));
    });
    return found;
  }
  std::error_code ec;
  if (fs::is_regular_file(location, ec)) return {local_file(location)};
  if (!fs::is_directory(location, ec)) return found;
  const fs::path folder = fs::canonical(location, ec);
  std::set<fs::path> visited = {folder};  // visited folders, with links resolved
  fs::recursive_directory_iterator it(location, fs::directory_options::follow_directory_symlink, ec), end;
  for (; !ec && it != end; it.increment(ec)) {
    std::string fault;
    std::error_code unknown;
    if (left_out && it->is_symlink(unknown)) fault = fault_of_link(it->path(), folder, out_of_folder);
    if (fault.empty() && it->is_directory(unknown) && !visited.insert(fs::weakly_canonical(it->path(), unknown)).second)
      fault = "it leads to a folder that is read anyway";
    if (it->path().filename().string().starts_with('.')) {
      it.disable_recursion_pending();
    } else if (!fault.empty()) {
      it.disable_recursion_pending();
      if (left_out) (*left_out)[it->path().string()] = fault;
    } else if (it->is_regular_file(ec)) {
      found.push_back(local_file(it->path()));
    } else if (left_out && !ec && !it->is_directory(unknown)) {
      (*left_out)[it->path().string()] = kNoRegularFile;
    }
  }
  check(!ec, Code::io, "folder '{}': {}", location, ec.message());
  return found;
}

bool is_local_name(const std::string& location) { return !is_remote(location) && exists(location); }

std::vector<FoundFile> list_one(const std::string& location) {
  const LocationParts p = split_location(location);
  std::vector<FoundFile> found;
  if (first_wildcard(p.path) != std::string::npos && !is_local_name(location)) {
    // Lists everything below the last folder before the first wildcard, then filters. A local folder that exists is a
    // name, whatever its letters.
    size_t root_end = p.path.rfind('/', first_wildcard(p.path));
    for (size_t next = p.path.find('/', root_end + 1); next != std::string::npos; next = p.path.find('/', next + 1))
      if (is_local_name(p.path.substr(0, next))) root_end = next;
    check(!is_remote(location) || root_end > std::string_view("s3://").size(), Code::io,
          "'{}': the name of a bucket has no wildcards", shown(location));
    const std::string root = root_end == std::string::npos ? "." : p.path.substr(0, std::max<size_t>(root_end, 1));
    const std::string pattern = p.path.substr(root_end + 1);  // all of it where there is no folder
    const size_t begin = root_end == std::string::npos ? std::string_view("./").size() : root_end + 1;
    const bool crosses = pattern.find("**") != std::string::npos;
    for (FoundFile& f : walk(root + p.query)) {
      const std::string path = split_location(f.location).path;
      if (::fnmatch(pattern.c_str(), path.c_str() + begin, crosses ? 0 : FNM_PATHNAME) == 0)
        found.push_back(std::move(f));
    }
    check(!found.empty(), Code::io, "'{}': no file matches", shown(location));
  } else {
    found = walk(location);
    std::error_code ec;
    check(!found.empty(), Code::io, "'{}': {}", shown(location),
          is_remote(location) || fs::exists(location, ec) ? "the folder holds no files" : "no such file or folder");
  }
  std::ranges::sort(found, {}, &FoundFile::location);
  return found;
}

}  // namespace

Blob Blob::of(std::string text) {
  auto owner = std::make_shared<const std::string>(std::move(text));
  return {owner, *owner};
}

std::shared_ptr<const InputFile> open_input(const std::string& location) { return open_input(FoundFile{location, -1}); }

std::shared_ptr<const InputFile> open_input(const FoundFile& file) {
  check_scheme(file.location);
  if (is_remote(file.location)) return remote_library().open(file.location, file.size);
  return std::make_shared<LocalFile>(file.location);
}

std::vector<FoundFile> list_files(const std::string& location) {
  std::vector<FoundFile> found = walk(location);
  std::ranges::sort(found, {}, &FoundFile::location);
  return found;
}

std::vector<FoundFile> list_files(const std::string& location, SkippedLinks& left_out, bool out_of_folder) {
  std::vector<FoundFile> found = walk(location, &left_out, out_of_folder);
  std::ranges::sort(found, {}, &FoundFile::location);
  return found;
}

RemoteScope::~RemoteScope() {
  if (remote_library_is_open()) remote_library().close();
}

std::vector<std::string> split_locations(const std::string& locations) { return split_where(locations, is_local_name); }

std::vector<FoundFile> list_inputs(const std::string& locations) {
  std::vector<FoundFile> all;
  for (const std::string& one : split_locations(locations))
    for (FoundFile& f : list_one(one)) all.push_back(std::move(f));
  check(!all.empty(), Code::io, "no files given");
  return all;
}

std::string fingerprint_of(const std::vector<FoundFile>& files) {
  std::string all;
  for (const FoundFile& f : files)
    all += fmt::format("{} {} {} {}\n", shown(f.location), f.size, f.modified, f.changed);
  return content_hash(all);
}

std::string names_and_sizes(const std::vector<FoundFile>& files) {
  std::string all;
  for (const FoundFile& f : files)
    all += fmt::format("{} {}\n", f.location.substr(f.location.find_last_of('/') + 1), f.size);
  return content_hash(all);
}

}  // namespace md
