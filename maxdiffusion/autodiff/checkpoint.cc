#include "maxdiffusion/autodiff/checkpoint.h"

#include <algorithm>
#include <cctype>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/ops/projection.h"

namespace md {
namespace {

/// A product with a table known to the graph (rotary positions on TPUs), which is no layer's.
bool is_with_constant(const Node& n) {
  return std::ranges::any_of(n.inputs, [](Tensor t) { return std::string_view(t.node()->op->name) == "table"; });
}

/// A region's decision for the results of matrix products without batch axes, and for named values.
struct Choice {
  Keep linear = Keep::recompute;
  RematNames names = {};
};

Keep chosen(const Choice& c, const Node& n) {
  const auto has = [&n](const std::vector<std::string>& names) { return std::ranges::count(names, n.name) > 0; };
  if (has(c.names.saved)) return Keep::keep;
  if (has(c.names.offloaded)) return Keep::offload;
  const bool linear = n.name == kProjection || (n.op->is_dot && !is_with_constant(n) &&
                                                std::any_cast<const DotDims&>(n.attributes).lhs_batch.empty());
  return linear ? c.linear : Keep::recompute;
}

const std::vector<std::pair<std::string, Choice>>& choices() {
  static const std::vector<std::pair<std::string, Choice>> all = {
      {"FULL", {}},
      {"MATMUL_WITHOUT_BATCH", {.linear = Keep::keep}},
      {"OFFLOAD_MATMUL_WITHOUT_BATCH", {.linear = Keep::offload}},
      {"HIDDEN_STATE_WITH_OFFLOAD",
       {.names = {.saved = {}, .offloaded = {value::kHiddenStates, value::kSelfAttn, value::kCrossAttn}}}},
      {"FLUX_OPTIMIZED", {.names = {.saved = {value::kAttnOutput, value::kLin1Hidden}, .offloaded = {}}}},
  };
  return all;
}

}  // namespace

std::vector<Tensor> checkpoint(const RematPolicy& policy, const GraphFn& f, const std::vector<Tensor>& xs) {
  if (!policy) return f(xs);
  check(!xs.empty(), Code::invalid_graph, "checkpoint: no inputs");
  RematScope scope(innermost(xs), policy);
  return f(xs);
}

RematPolicy remat_policy(const std::string& name, const RematNames& names) {
  auto policy = [](const Choice& choice) { return [choice](const Node& n) { return chosen(choice, n); }; };
  std::string upper = name;
  std::vector<std::string> known = {"NONE"};
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  if (upper == "NONE") return {};
  if (upper == "CUSTOM") return policy({.names = names});
  for (const auto& [candidate, choice] : choices()) {
    if (upper == candidate) return policy(choice);
    known.push_back(candidate);
  }
  known.emplace_back("CUSTOM");
  fail(Code::invalid_config, "remat_policy is '{}'; expected one of: {}", name, nearest_first(name, known));
}

}  // namespace md
