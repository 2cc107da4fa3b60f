// Logical-axis rules: a table from logical names to mesh axes, as YAML data.
// Semantics and default tables are those that users of MaxDiffusion know (its logical_axis_rules key).
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
  /// From the YAML text `[['batch', 'data'], ['embed', ['fsdp', 'tensor']], ['norm', null]]`; Python's tuples and
  /// None are understood. Throws invalid_config, also on an axis that is not one of `mesh_axes`.
  static AxisRules parse(const std::string& yaml, const std::vector<std::string>& mesh_axes);
  /// The default table for UNet models: the documented one plus `mlp: tensor`, and `activation_length: context` (keys
  /// and values are gathered).
  static AxisRules unet();

  /// Earlier rules win; a mesh axis is used once per tensor; "" is replicated. Mesh axes of size 1 are dropped.
  /// A rule that does not divide its dim, or whose axes another dim has taken, is passed over for the next rule of that
  /// name; a dim without a rule left stays whole. With `strict`, a dim that stays whole because nothing divides it
  /// throws invalid_config. `data_batch` has rules of its own unless the table names it: all mesh axes, else
  /// data × fsdp, else data. Throws invalid_graph on a name that is neither in the vocabulary (mesh/logical_axes.h)
  /// nor in the table, with the known names, and on a name used twice.
  Sharding resolve(const Mesh& mesh, const std::vector<std::string>& names, const std::vector<int64_t>& dims,
                   bool strict = false) const;
  const std::vector<AxisRule>& rules() const { return rules_; }

 private:
  std::vector<AxisRule> rules_;
};

}  // namespace md
