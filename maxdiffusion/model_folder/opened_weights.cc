#include "maxdiffusion/model_folder/opened_weights.h"

namespace md {

void OpenedWeights::keep(const std::string& component, const std::string& path, File file) {
  const std::lock_guard lock(mutex_);
  kept_[{component, path}] = std::move(file);
}

OpenedWeights::File OpenedWeights::take(const std::string& component, const std::string& path) {
  {
    const std::lock_guard lock(mutex_);
    if (auto kept = kept_.extract({component, path})) return std::move(kept.mapped());
  }
  return open(path);
}

}  // namespace md
