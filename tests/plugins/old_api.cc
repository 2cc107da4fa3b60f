// An outdated plugin, to test that it is rejected: it has GetPjrtApi and reports API version 0.29.
#include <pjrt_c_api.h>

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = [] {
    PJRT_Api a{};
    a.struct_size = PJRT_Api_STRUCT_SIZE;
    a.pjrt_api_version.struct_size = PJRT_Api_Version_STRUCT_SIZE;
    a.pjrt_api_version.major_version = 0;
    a.pjrt_api_version.minor_version = 29;
    return a;
  }();
  return &api;
}
