// Opens the shared libraries that need Arrow.
#pragma once

#include <dlfcn.h>

#include "maxdiffusion/base/error.h"

namespace md {

/// Opens the library `file` for good and returns what its function `maker` makes. Throws io where it cannot be opened,
/// naming `who` needs it.
template <class Interface>
Interface& open_library(const char* file, const char* maker, const char* who) {
  void* library = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, Code::io, "{} need {}: {}", who, file, library ? "" : ::dlerror());
  const auto make = reinterpret_cast<Interface* (*)()>(::dlsym(library, maker));
  check(make != nullptr, Code::internal, "{} has no {}", file, maker);
  return *make();
}

}  // namespace md
