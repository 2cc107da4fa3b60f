#include "maxdiffusion/storage/remote_library.h"

#include <atomic>

#include "maxdiffusion/base/shared_library.h"

namespace md {
namespace {

std::atomic<bool> is_open = false;

}  // namespace

RemoteLibrary& remote_library() {
  static RemoteLibrary& library =
      open_library<RemoteLibrary>("md_remote.so", "md_remote_library", "gs:// and s3:// locations");
  is_open = true;
  return library;
}

bool remote_library_is_open() { return is_open; }

}  // namespace md
