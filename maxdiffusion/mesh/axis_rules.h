// Logical-axis rules: a table from logical names to mesh axes, as YAML data.
// Source: ../shared/spec/parallelism.md sections 3–5.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/mesh/sharding.h"

namespace md {

struct AxisRule {
  std::string logical;
  std::vector<std::string> mesh;  // empty: replicated
};

class AxisRules {
 public:
  explicit AxisRules(std::vector<AxisRule> rules) : rules_(std::move(rules)) {}
  /// From the YAML text `[['batch', 'data'], ['embed', ['fsdp', 'tensor']], ['norm', null]]`. Throws invalid_config.
  static AxisRules parse(const std::string& yaml, const std::vector<std::string>& mesh_axes);
  /// The default table for UNet models (spec section 4, plus `mlp: tensor`).
  static AxisRules unet();

  /// Earlier rules win; a mesh axis is used once per tensor; "" is replicated. Mesh axes of size 1 are dropped.
  /// A dim that its axes do not divide stays whole for that rule (the next rule is tried) when `strict` is false,
  /// else throws invalid_config. Throws invalid_graph naming a logical name that has no rule, with the known names.
  Sharding resolve(const Mesh& mesh, const std::vector<std::string>& names, const std::vector<int64_t>& dims,
                   bool strict = false) const;
  const std::vector<AxisRule>& rules() const { return rules_; }

 private:
  std::vector<AxisRule> rules_;
};

}  // namespace md
