#include "maxdiffusion/pipelines/sample_keys.h"

#include "maxdiffusion/base/error.h"

namespace md {

std::string StepCacheKeys::step_cache() const {
  return use_cfg_cache ? "use_cfg_cache" : use_magcache ? "use_magcache" : use_sen_cache ? "use_sen_cache" : "";
}

void StepCacheKeys::validate() const {
  check(use_cfg_cache + use_magcache + use_sen_cache <= 1, Code::invalid_config,
        "use_cfg_cache, use_magcache, use_sen_cache: several are true; expected one at most");
}

}  // namespace md
