#include "maxdiffusion/server/samplers.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/schedulers/sampler_names.h"

namespace md {

const std::vector<std::string>& sampler_titles() {
  static const std::vector<std::string> titles = [] {
    std::vector<std::string> out;
    for (const std::string& name : sampler_names()) {
      if (name.ends_with("_karras") || name.ends_with("_exponential") || name.starts_with("flow_")) continue;
      nlohmann::json config = {{"_class_name", "EulerDiscreteScheduler"}};
      choose_sampler(config, name, {});
      const std::string title = sampler_title(config).sampler;
      out.push_back(sampler_name(title) == name ? title : name);
    }
    return out;
  }();
  return titles;
}

}  // namespace md
