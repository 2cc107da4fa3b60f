#include "maxdiffusion/model_folder/opened_weights.h"

namespace md {

void OpenedWeights::keep(const std::string& component, const std::string& path, File file) {
  const std::lock_guard lock(mutex_);
  cached_[{component, path}] = std::move(file);
}

OpenedWeights::File OpenedWeights::take(const std::string& component, const std::string& path) {
  {
    const std::lock_guard lock(mutex_);
    if (auto cached = cached_.extract({component, path})) return std::move(cached.mapped());
  }
  return open(path);
}

}  // namespace md
