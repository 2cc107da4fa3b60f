#include "maxdiffusion/autodiff/checkpoint.h"

#include <algorithm>
#include <cctype>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

Keep keep_nothing(const Node&) { return Keep::recompute; }

struct NamedPolicy {
  const char* name;
  RematPolicy policy;
};

const std::vector<NamedPolicy>& policies() {
  static const std::vector<NamedPolicy> list = {
      {"NONE", {}},
      {"FULL", keep_nothing},
  };
  return list;
}

}  // namespace

std::vector<Tensor> checkpoint(const RematPolicy& policy, const GraphFn& f, const std::vector<Tensor>& xs) {
  if (!policy) return f(xs);
  check(!xs.empty(), Code::invalid_graph, "checkpoint: no inputs");
  RematScope scope(innermost(xs), policy);
  return f(xs);
}

RematPolicy remat_policy(const std::string& name) {
  std::string upper = name, known;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const NamedPolicy& p : policies()) {
    if (upper == p.name) return p.policy;
    known += (known.empty() ? "" : ", ") + std::string(p.name);
  }
  fail(Code::invalid_config, "remat_policy: '{}' is not one of: {}", name, known);
}

bool remat_is_none(const std::string& name) { return !remat_policy(name); }

}  // namespace md
