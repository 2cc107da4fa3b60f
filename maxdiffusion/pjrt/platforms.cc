// The list of platforms.
#include "maxdiffusion/pjrt/platforms.h"

#include "maxdiffusion/base/error.h"

namespace md::pjrt {

const std::vector<const PlatformDef*>& platforms() {
  static const std::vector<const PlatformDef*> all = {&kCpuPlatform, &kGpuPlatform, &kTpuPlatform};
  return all;
}

const PlatformDef& platform_for(std::string_view hardware) {
  std::string known;
  for (const PlatformDef* p : platforms()) {
    if (hardware == p->hardware) return *p;
    known += std::string(known.empty() ? "" : ", ") + p->hardware;
  }
  fail(Code::invalid_config, "hardware: '{}' is not one of {}", hardware, known);
}

}  // namespace md::pjrt
