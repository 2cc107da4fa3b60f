#include "maxdiffusion/data/arrow_part.h"

#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/remote_part.h"

namespace md {
namespace {

namespace fs = std::filesystem;

/// Of a program installed as PREFIX/bin/NAME, the library installed with it; else the one that was built.
std::string installed_or(const char* built) {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  const fs::path installed = program.parent_path().parent_path() / MD_PARTS_FOLDER / fs::path(built).filename();
  return fs::exists(installed, error) ? installed.string() : built;
}

template <class Part>
Part& opened(const std::string& file, const char* maker, const char* who) {
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, Code::io, "{} need {}: {}", who, file, library ? "" : ::dlerror());
  const auto make = reinterpret_cast<Part* (*)()>(::dlsym(library, maker));
  check(make != nullptr, Code::internal, "{} has no {}", file, maker);
  return *make();
}

std::atomic<bool> remote_is_open = false;

}  // namespace

const ArrowPart& arrow_part() {
  static const auto& part =
      opened<const ArrowPart>(installed_or(MD_ARROW_PART), "md_arrow_part", "Parquet and Arrow files");
  return part;
}

RemotePart& remote_part() {
  static RemotePart& part =
      opened<RemotePart>(installed_or(MD_REMOTE_PART), "md_remote_part", "gs:// and s3:// locations");
  remote_is_open = true;
  return part;
}

bool remote_part_is_open() { return remote_is_open; }

}  // namespace md
