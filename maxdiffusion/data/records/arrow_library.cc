#include "maxdiffusion/data/records/arrow_library.h"

#include <dlfcn.h>

#include <atomic>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/storage/remote_library.h"

namespace md {
namespace {

template <class Part>
Part& opened(const char* file, const char* maker, const char* who) {
  void* library = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, Code::io, "{} need {}: {}", who, file, library ? "" : ::dlerror());
  const auto make = reinterpret_cast<Part* (*)()>(::dlsym(library, maker));
  check(make != nullptr, Code::internal, "{} has no {}", file, maker);
  return *make();
}

std::atomic<bool> remote_is_open = false;

}  // namespace

const ArrowLibrary& arrow_library() {
  static const auto& part = opened<const ArrowLibrary>(MD_ARROW_LIBRARY, "md_arrow_library", "Parquet and Arrow files");
  return part;
}

RemoteLibrary& remote_library() {
  static RemoteLibrary& part =
      opened<RemoteLibrary>(MD_REMOTE_LIBRARY, "md_remote_library", "gs:// and s3:// locations");
  remote_is_open = true;
  return part;
}

bool remote_library_is_open() { return remote_is_open; }

}  // namespace md
