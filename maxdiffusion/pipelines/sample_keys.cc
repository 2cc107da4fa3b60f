#include "maxdiffusion/pipelines/sample_keys.h"

#include "maxdiffusion/base/error.h"

namespace md {

void StepCacheKeys::validate() const {
  for (const auto& [key, set] : {std::pair{"use_cfg_cache", use_cfg_cache}, std::pair{"use_magcache", use_magcache},
                                 std::pair{"use_sen_cache", use_sen_cache}})
    check(!set, Code::invalid_config, "{} is set, but it is not there yet; set it to false", key);
}

}  // namespace md
