#include "maxdiffusion/base/shared_library.h"
#include "maxdiffusion/server/http.h"

namespace md {

ListenLibrary& listen_library() {
  static ListenLibrary& library = open_library<ListenLibrary>("md_listen.so", "md_listen_library", "servers");
  return library;
}

}  // namespace md
