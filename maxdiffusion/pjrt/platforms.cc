// The list of platforms.
#include "maxdiffusion/pjrt/platforms.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"

namespace md::pjrt {

const std::vector<const PlatformDef*>& platforms() {
  static const std::vector<const PlatformDef*> all = {&kCpuPlatform, &kGpuPlatform, &kTpuPlatform};
  return all;
}

const PlatformDef& platform_for(std::string_view hardware) {
  std::vector<std::string> known;
  for (const PlatformDef* p : platforms()) {
    if (hardware == p->hardware) return *p;
    known.emplace_back(p->hardware);
  }
  fail(Code::invalid_config, "hardware is '{}'; expected one of: {}", hardware,
       nearest_first(std::string(hardware), known));
}

}  // namespace md::pjrt
