// Opens this project's shared libraries with optional dependencies (Arrow, MPI, FFmpeg).
#pragma once

#include <dlfcn.h>

#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/installation.h"

namespace md {

/// Opens the library `name` of this program until the process ends, and returns the result of its function `maker`.
/// Throws io if it cannot be opened; the message names `needed_by`.
template <class Interface>
Interface& open_library(const char* name, const char* maker, const char* needed_by) {
  const std::string file = part_file(name);
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, Code::io, "{} need {}: {}", needed_by, file, library ? "" : ::dlerror());
  const auto make = reinterpret_cast<Interface* (*)()>(::dlsym(library, maker));
  if (make == nullptr) fail(Code::internal, "{} has no {}", file, maker);
  return *make();
}

}  // namespace md
