#include "maxdiffusion/storage/http_library.h"

#include "maxdiffusion/base/shared_library.h"

namespace md {

HttpLibrary& http_library() {
  static HttpLibrary& library = open_library<HttpLibrary>("md_http.so", "md_http_library", "downloads");
  return library;
}

}  // namespace md
