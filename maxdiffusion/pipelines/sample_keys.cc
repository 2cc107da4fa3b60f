#include "maxdiffusion/pipelines/sample_keys.h"

#include "maxdiffusion/base/error.h"

namespace md {

std::string StepCacheKeys::step_cache() const {
  return use_cfg_cache ? "use_cfg_cache" : use_magcache ? "use_magcache" : use_sen_cache ? "use_sen_cache" : "";
}

void StepCacheKeys::validate() const {
  check(use_cfg_cache + use_magcache + use_sen_cache <= 1, Code::invalid_config,
        "use_cfg_cache, use_magcache and use_sen_cache are in each other's way; set one of them");
}

}  // namespace md
