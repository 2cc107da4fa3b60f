#include "maxdiffusion/data/records/captioned_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/new_files.h"

namespace md {
namespace {

namespace fs = std::filesystem;

// Writes to a temporary name and renames, so that a file is old or new but never partial; one sync at the end covers
// all files.
void replace_without_sync(const std::string& path, const std::string& bytes) {
  const std::string temporary = new_file_next_to(path);
  std::error_code ec;
  try {
    FileWriter out(temporary);
    out.write(bytes.data(), bytes.size());
    fs::rename(temporary, path, ec);
    check(!ec, Code::io, "rename '{}' to '{}': {}", temporary, path, ec.message());
  } catch (...) {
    fs::remove(temporary, ec);
    throw;
  }
}

void sync_file_system(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && ::syncfs(fd) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  check(ok, Code::io, "sync '{}': {}", folder, std::strerror(error));
}

}  // namespace

void write_captioned_files(const std::string& folder, const std::string& extension,
                           const std::vector<CaptionedFile>& files) {
  make_folders(folder);
  const auto name = [&](size_t i) { return fmt::format("{:04}{}", i, extension); };
  std::string metadata;
  for (size_t i = 0; i < files.size(); ++i) {
    replace_without_sync((fs::path(folder) / name(i)).string(), files[i].bytes);
    nlohmann::ordered_json row{{"file_name", name(i)}};
    row.update(files[i].columns);
    metadata += row.dump() + "\n";
  }
  sync_file_system(folder);
  write_file_atomic((fs::path(folder) / "metadata.jsonl").string(), metadata);
  // Files of an earlier call would be listed without captions.
  for (size_t i = files.size(); fs::remove(fs::path(folder) / name(i)); ++i) {
  }
}

}  // namespace md
