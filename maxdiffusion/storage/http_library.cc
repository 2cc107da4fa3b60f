#include "maxdiffusion/storage/http_library.h"

#include "maxdiffusion/base/shared_library.h"

namespace md {

HttpLibrary& http_library() {
  static HttpLibrary& library = open_library<HttpLibrary>(MD_HTTP_LIBRARY, "md_http_library", "downloads");
  return library;
}

}  // namespace md
