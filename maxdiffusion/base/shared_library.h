// Opens this project's shared libraries with optional dependencies (Arrow, MPI, FFmpeg).
#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "maxdiffusion/base/error.h"

namespace md {

/// The installed library if this program is PREFIX/bin/NAME; else `built`.
inline std::string installed_or(const char* built) {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error),
                              installed = program.parent_path().parent_path() / MD_PARTS_FOLDER /
                                          std::filesystem::path(built).filename();
  return std::filesystem::exists(installed, error) ? installed.string() : built;
}

/// Opens the library `built`, or the one installed with the program, until the process ends, and returns the result of
/// its function `maker`. Throws io if it cannot be opened; the message names `who`, which needs it.
template <class Interface>
Interface& open_library(const char* built, const char* maker, const char* who) {
  const std::string file = installed_or(built);
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, Code::io, "{} need {}: {}", who, file, library ? "" : ::dlerror());
  const auto make = reinterpret_cast<Interface* (*)()>(::dlsym(library, maker));
  if (make == nullptr) fail(Code::internal, "{} has no {}", file, maker);
  return *make();
}

}  // namespace md
