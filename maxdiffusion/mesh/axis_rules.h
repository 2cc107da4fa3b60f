// Logical-axis rules: a table from logical names to mesh axes, as YAML data.
// Semantics and default tables are those that users of MaxDiffusion know (its logical_axis_rules key).
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/base/json_text.h"
#include "maxdiffusion/mesh/sharding.h"

namespace md {

struct AxisRule {
  std::string logical;
  std::vector<std::string> mesh;  // empty: replicated
  bool operator==(const AxisRule&) const = default;
};

/// Which mesh axes split what.
struct ShardingKeys {
  JsonText logical_axis_rules, data_sharding;
  bool attention_sharding_uniform = true;
  template <class V>
  void visit(V&& v) {
    v("logical_axis_rules", logical_axis_rules,
      "logical names → mesh axes, as [['embed', 'fsdp'], …]; empty: built in");
    v("data_sharding", data_sharding,
      "mesh axes over which batches are split, as [['data', 'fsdp']]; empty: all that divide");
    v("attention_sharding_uniform", attention_sharding_uniform,
      "split the sequence in attention over context; false: only as logical_axis_rules say");
  }
};

class AxisRules {
 public:
  explicit AxisRules(std::vector<AxisRule> rules) : rules_(std::move(rules)) {}
  /// From the YAML text `[['batch', 'data'], ['embed', ['fsdp', 'tensor']], ['norm', null]]`; Python's tuples and
  /// None are understood. Throws invalid_config, also on an axis that is not one of `mesh_axes`.
  static AxisRules parse(const std::string& yaml, const std::vector<std::string>& mesh_axes);
  /// The table of `keys.logical_axis_rules`, or the documented one of UNet models where that is empty, and
  ///   with attention_sharding_uniform, as in MaxDiffusion: `activation_length: context` and `activation_kv_length:
  ///     context` after it, and before it the rules of self and cross attention (queries over context, keys and
  ///     values whole, heads over tensor, where MaxDiffusion keeps them whole);
  ///   `mlp: tensor` where the table does not name `mlp` (MaxDiffusion's tables for UNets do not: it keeps feed-forward
  ///     layers whole; `['mlp', null]` does that);
  ///   a rule of `data_batch` first, where data_sharding names fewer than all mesh axes;
  ///   where mesh_axes has `fsdp_batch`, that beside `fsdp` in every rule.
  /// With `sequences`, fsdp devices that a batch cannot be divided among divide the sequence of each sample.
  /// Throws invalid_config as parse().
  static AxisRules make(const ShardingKeys& keys, const std::vector<std::string>& mesh_axes, bool sequences = false);
  /// make() where the table of a family (Family::axis_rules) takes the place of the documented one; empty: it has none.
  static AxisRules for_family(ShardingKeys keys, const std::vector<std::string>& mesh_axes,
                              const std::string& of_family);
  /// What make() gives without any key.
  static AxisRules defaults();

  /// Earlier rules win; a mesh axis is used once per tensor; "" is replicated. Mesh axes of size 1 are dropped.
  /// A rule that does not divide its dim, or whose axes another dim has taken, is passed over for the next rule of that
  /// name; a dim without a rule left stays whole. A batch (activation_batch, conv_batch) that the last such rule does
  /// not divide takes those of its axes that do, the first ones first; see make() for the others. What stays whole
  /// because nothing divides it is named in a warning, once for each axis, name and size. With `strict`, a dim that
  /// stays whole because nothing divides it throws invalid_config. `data_batch` has rules of its own unless the table
  /// names it: all mesh axes, else data × fsdp, else data. Throws invalid_graph on a name that is neither in the
  /// vocabulary (mesh/logical_axes.h) nor in the table, with the known names, and on a name used twice.
  Sharding resolve(const Mesh& mesh, const std::vector<std::string>& names, const std::vector<int64_t>& dims,
                   bool strict = false) const;
  const std::vector<AxisRule>& rules() const { return rules_; }

 private:
  std::vector<AxisRule> rules_;
  bool sequences_ = false;
};

}  // namespace md
