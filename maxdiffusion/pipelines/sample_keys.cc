#include "maxdiffusion/pipelines/sample_keys.h"

#include <fmt/ranges.h>

#include "maxdiffusion/base/error.h"

namespace md {

std::vector<std::pair<std::string, bool>> StepCacheKeys::step_caches() const {
  return {{"use_cfg_cache", use_cfg_cache}, {"use_magcache", use_magcache},
          {"use_sen_cache", use_sen_cache}, {"use_first_block_cache", use_first_block_cache},
          {"use_teacache", use_teacache},   {"use_deepcache", use_deepcache}};
}

std::string StepCacheKeys::step_cache() const {
  for (const auto& [key, enabled] : step_caches())
    if (enabled) return key;
  return "";
}

void StepCacheKeys::validate() const {
  std::vector<std::string> all;
  int64_t enabled_caches = 0;
  for (const auto& [key, enabled] : step_caches()) all.push_back(key), enabled_caches += enabled ? 1 : 0;
  check(enabled_caches <= 1, Code::invalid_config, "{}: several are true; expected one at most", fmt::join(all, ", "));
}

}  // namespace md
