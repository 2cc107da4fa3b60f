#include "maxdiffusion/nn/repeatable.h"

#include <map>
#include <memory>
#include <string>
#include <utility>

namespace md {

Scope repeatable(const Scope& s) {
  return s.with_source([known = std::make_shared<std::map<std::string, Tensor>>()](const Scope& below, Param p) {
    Tensor& t = (*known)[p.path];
    return t ? t : t = below.resolve(std::move(p));
  });
}

}  // namespace md
