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

/// Keys of the logical-axis rules.
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
      "split the sequence in attention over context; false: only by logical_axis_rules");
  }
};

class AxisRules {
 public:
  explicit AxisRules(std::vector<AxisRule> rules) : rules_(std::move(rules)) {}
  /// From the YAML text [['batch', 'data'], ['embed', ['fsdp', 'tensor']], ['norm', null]]; Python's tuples and
  /// None are understood. Throws invalid_config, also on an axis that is not one of `mesh_axes`.
  static AxisRules parse(const std::string& yaml, const std::vector<std::string>& mesh_axes);
  /// The table of `keys.logical_axis_rules`, or the documented one of UNet models if that is empty, and
  ///   with attention_sharding_uniform, as in MaxDiffusion: `activation_length: context` and `activation_kv_length:
  ///     context` after it, and before it the rules of self and cross attention (queries over context, keys and
  ///     values replicated, heads over tensor, where MaxDiffusion replicates them);
  ///   `mlp: tensor` unless the table names `mlp` (MaxDiffusion's tables for UNets do not, and replicate feed-forward
  ///     layers, as [mlp, null] does);
  ///   a rule of `data_batch` first, if data_sharding names fewer than all mesh axes;
  ///   `fsdp_batch` after `fsdp` in every rule, if mesh_axes has it.
  /// With `sequences`, fsdp devices shard the sequence of each sample if the batch is not divisible by them. Throws
  /// invalid_config as parse().
  static AxisRules make(const ShardingKeys& keys, const std::vector<std::string>& mesh_axes, bool sequences = false);
  /// As make(), with the default table of a family (FamilySpec::axis_rules); empty: the table of UNet models.
  static AxisRules for_family(ShardingKeys keys, const std::vector<std::string>& mesh_axes,
                              const std::string& of_family);
  /// make() with default keys.
  static AxisRules defaults();

  /// Earlier rules win; a mesh axis is used once per tensor; "" is replicated. Mesh axes of size 1 are dropped. A rule
  /// that does not divide its dim, or whose axes another dim uses, is skipped for the next rule of that name; a dim
  /// without another rule is replicated. A batch dim (activation_batch, conv_batch) that the last rule does not divide
  /// uses the axes of that rule that do, in order. A dim that is replicated because no rule divides it is reported in a
  /// warning, once for each axis, name and size; with `strict`, it throws invalid_config. `data_batch` has default
  /// rules unless the table names it: all mesh axes, else data × fsdp, else data. Throws invalid_graph on a name that
  /// is neither in the vocabulary (mesh/logical_axes.h) nor in the table, with the known names, and on a name used
  /// twice.
  Sharding resolve(const Mesh& mesh, const std::vector<std::string>& names, const std::vector<int64_t>& dims,
                   bool strict = false) const;
  const std::vector<AxisRule>& rules() const { return rules_; }

 private:
  std::vector<AxisRule> rules_;
  bool sequences_ = false;
};

}  // namespace md
