#include "maxdiffusion/autodiff/checkpoint.h"

#include <algorithm>
#include <cctype>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/dot.h"

namespace md {
namespace {

using Names = std::vector<std::string>;

RematPolicy keep_all(const Names&) { return {}; }
RematPolicy keep_nothing(const Names&) {
  return [](const Node&) { return Keep::recompute; };
}
RematPolicy keep_linear(const Names&) {
  return [](const Node& n) {
    return n.op->is_dot && std::any_cast<const DotDims&>(n.attributes).lhs_batch.empty() ? Keep::keep : Keep::recompute;
  };
}
RematPolicy keep_named(const Names& names) {
  return [names](const Node& n) { return std::ranges::count(names, n.name) > 0 ? Keep::keep : Keep::recompute; };
}
RematPolicy keep_states(const Names&) { return keep_named({"hidden_states", "self_attn", "cross_attn"}); }

struct NamedPolicy {
  const char* name;
  RematPolicy (*make)(const Names& names);
};
constexpr NamedPolicy kPolicies[] = {
    {"NONE", keep_all},
    {"FULL", keep_nothing},
    {"MATMUL_WITHOUT_BATCH", keep_linear},
    {"OFFLOAD_MATMUL_WITHOUT_BATCH", keep_linear},
    {"HIDDEN_STATE_WITH_OFFLOAD", keep_states},
    {"CUSTOM", keep_named},
};

}  // namespace

std::vector<Tensor> checkpoint(const RematPolicy& policy, const GraphFn& f, const std::vector<Tensor>& xs) {
  if (!policy) return f(xs);
  check(!xs.empty(), Code::invalid_graph, "checkpoint: no inputs");
  RematScope scope(innermost(xs), policy);
  return f(xs);
}

RematPolicy remat_policy(const std::string& name, const std::vector<std::string>& names) {
  std::string upper = name, known;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const NamedPolicy& p : kPolicies) {
    if (upper == p.name) return p.make(names);
    known += (known.empty() ? "" : ", ") + std::string(p.name);
  }
  fail(Code::invalid_config, "remat_policy: '{}' is not one of: {}", name, known);
}

bool remat_is_none(const std::string& name) { return !remat_policy(name); }

}  // namespace md
