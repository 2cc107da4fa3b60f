// The rule table as data, and the lookup that turns logical names into mesh axes.

#include "maxdiffusion/mesh/axis_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/load_yaml.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/mesh/logical_axes.h"

namespace md {
namespace {

constexpr const char* kForm = "a list of pairs [name, axis | [axes] | null], e.g. [['batch', 'data'], ['norm', null]]";

bool is_null(const YAML::Node& n) { return n.IsNull() || (n.IsScalar() && n.Scalar() == "None"); }

AxisRule parse_rule(const YAML::Node& pair, size_t index, const std::vector<std::string>& mesh_axes) {
  check(pair.IsSequence() && pair.size() == 2 && pair[0].IsScalar(), Code::invalid_config,
        "logical_axis_rules: entry {} is not a pair; expected {}", index, kForm);
  AxisRule rule{pair[0].Scalar(), {}};
  const YAML::Node& to = pair[1];
  if (is_null(to)) return rule;
  if (to.IsScalar()) {
    rule.mesh.push_back(to.Scalar());
  } else {
    check(to.IsSequence(), Code::invalid_config, "logical_axis_rules: '{}' maps to a mapping; expected {}",
          rule.logical, kForm);
    for (const auto& axis : to) {
      check(axis.IsScalar(), Code::invalid_config, "logical_axis_rules: '{}' has a nested list; expected {}",
            rule.logical, kForm);
      rule.mesh.push_back(axis.Scalar());
    }
  }
  for (size_t i = 0; i < rule.mesh.size(); ++i) {
    const auto& axis = rule.mesh[i];
    check(std::find(mesh_axes.begin(), mesh_axes.end(), axis) != mesh_axes.end(), Code::invalid_config,
          "logical_axis_rules: '{}' maps to the unknown mesh axis '{}'; mesh_axes are {}", rule.logical, axis,
          fmt::join(mesh_axes, ", "));
    check(std::count(rule.mesh.begin(), rule.mesh.end(), axis) == 1, Code::invalid_config,
          "logical_axis_rules: '{}' names the mesh axis '{}' twice", rule.logical, axis);
  }
  return rule;
}

/// The documented table of Stable Diffusion and SDXL (MaxDiffusion's configs/base_xl.yml).
std::vector<AxisRule> unet_rules() {
  return {
      {"batch", {"data"}},
      {axis::kBatch, {"data", "fsdp"}},
      {axis::kHeadsAct, {"tensor"}},
      {axis::kKv, {"tensor"}},
      {axis::kEmbed, {"fsdp"}},
      {axis::kHeads, {"tensor"}},
      {axis::kConvBatch, {"data", "fsdp"}},
      {axis::kOutChannels, {"tensor"}},
      {axis::kConvOut, {"fsdp"}},
  };
}

constexpr const char* kFsdpBatch = "fsdp_batch";

/// Adds fsdp_batch after fsdp in every rule.
void split_as_fsdp(std::vector<AxisRule>& rules) {
  for (AxisRule& rule : rules) {
    const auto at = std::ranges::find(rule.mesh, "fsdp");
    if (at != rule.mesh.end() && std::ranges::count(rule.mesh, kFsdpBatch) == 0) rule.mesh.insert(at + 1, kFsdpBatch);
  }
}

bool is_set(const JsonText& t) { return !t.text.empty() && t.text != "null" && t.text != "[]"; }

/// Default rules of batch arrays: shard along as many axes as their size allows.
const std::vector<AxisRule>& batch_rules() {
  static const std::vector<AxisRule> rules = {
      {axis::kData, {"data", "fsdp", "fsdp_batch", "context", "tensor"}},
      {axis::kData, {"data", "fsdp", "fsdp_batch"}},
      {axis::kData, {"data"}},
  };
  return rules;
}

bool is_batch(const std::string& name) { return name == axis::kBatch || name == axis::kConvBatch; }
bool is_length(const std::string& name) {
  return name == axis::kLength || name == axis::kSelfLength || name == axis::kCrossLength;
}

/// "data = 32, fsdp = 4".
std::string sizes(const Mesh& mesh, const std::vector<std::string>& axes) {
  std::vector<std::string> out;
  for (const std::string& a : axes) out.push_back(fmt::format("{} = {}", a, mesh.size(a)));
  return out.empty() ? "no axis" : fmt::format("{}", fmt::join(out, ", "));
}

const std::set<std::string>& vocabulary() {
  static const std::set<std::string> words(std::begin(axis::kAll), std::end(axis::kAll));
  return words;
}

}  // namespace

AxisRules AxisRules::parse(const std::string& yaml, const std::vector<std::string>& mesh_axes) {
  std::string text = yaml;  // Python's tuples are read as lists
  std::replace(text.begin(), text.end(), '(', '[');
  std::replace(text.begin(), text.end(), ')', ']');
  YAML::Node root;
  try {
    root = load_yaml(text);
  } catch (const YAML::Exception& e) {
    fail(Code::invalid_config, "logical_axis_rules: {} at column {}; expected {}", e.msg, e.mark.column + 1, kForm);
  }
  check(root.IsSequence(), Code::invalid_config, "logical_axis_rules: not a list; expected {}", kForm);
  std::vector<AxisRule> rules;
  for (size_t i = 0; i < root.size(); ++i) rules.push_back(parse_rule(root[i], i, mesh_axes));
  return AxisRules(std::move(rules));
}

AxisRules AxisRules::make(const ShardingKeys& keys, const std::vector<std::string>& mesh_axes, bool sequences) {
  std::vector<AxisRule> rules =
      is_set(keys.logical_axis_rules) ? parse(keys.logical_axis_rules.text, mesh_axes).rules() : unet_rules();
  if (keys.attention_sharding_uniform) {
    for (const AxisRule& rule : {AxisRule{axis::kLength, {"context"}}, AxisRule{axis::kKvLength, {"context"}}})
      if (std::find(rules.begin(), rules.end(), rule) == rules.end()) rules.push_back(rule);
    const std::vector<AxisRule> inside = {
        {axis::kSelfHeads, {"tensor"}},  {axis::kSelfLength, {"context"}},  {axis::kSelfKvLength, {}},
        {axis::kCrossHeads, {"tensor"}}, {axis::kCrossLength, {"context"}}, {axis::kCrossKvLength, {}},
    };
    rules.insert(rules.begin(), inside.begin(), inside.end());
  }
  if (std::none_of(rules.begin(), rules.end(), [](const AxisRule& r) { return r.logical == axis::kMlp; }))
    rules.push_back({axis::kMlp, {"tensor"}});
  if (is_set(keys.data_sharding)) {
    // A list of axes for axis 0 of every batch; the default rules use fewer axes if not all divide it.
    const std::string& text = keys.data_sharding.text;
    const AxisRule batch =
        parse(fmt::format("[['{}', {}]]", axis::kData, text.substr(1, text.size() - 2)), mesh_axes).rules()[0];
    if (batch.mesh.size() + std::ranges::count(mesh_axes, kFsdpBatch) < mesh_axes.size())
      rules.insert(rules.begin(), batch);
  }
  if (std::ranges::count(mesh_axes, kFsdpBatch) > 0) split_as_fsdp(rules);
  AxisRules out(std::move(rules));
  out.sequences_ = sequences;
  return out;
}

AxisRules AxisRules::for_family(ShardingKeys keys, const std::vector<std::string>& mesh_axes,
                                const std::string& of_family) {
  if (keys.logical_axis_rules.text.empty()) keys.logical_axis_rules.text = of_family;
  return make(keys, mesh_axes, of_family.find(axis::kLength) != std::string::npos);
}

AxisRules AxisRules::defaults() { return make({}, MeshConfig().mesh_axes); }

Sharding AxisRules::resolve(const Mesh& mesh, const std::vector<std::string>& names, const std::vector<int64_t>& dims,
                            bool strict) const {
  check(names.size() == dims.size(), Code::invalid_graph, "sharding: {} logical names [{}] for {} dims [{}]",
        names.size(), fmt::join(names, ", "), dims.size(), fmt::join(dims, ","));
  auto has_rule = [&](const std::string& name) {
    return std::any_of(rules_.begin(), rules_.end(), [&](const AxisRule& r) { return r.logical == name; });
  };
  for (const auto& name : names) {
    if (name.empty()) continue;
    check(std::count(names.begin(), names.end(), name) == 1, Code::invalid_graph,
          "sharding: the logical name '{}' appears twice in [{}]", name, fmt::join(names, ", "));
    if (vocabulary().contains(name) || has_rule(name)) continue;
    std::set<std::string> known = vocabulary();
    for (const auto& r : rules_) known.insert(r.logical);
    fail(Code::invalid_graph, "sharding: no rule for the logical name '{}'; expected one of: {}", name,
         nearest_first(name, {known.begin(), known.end()}));
  }

  std::vector<AxisRule> walk = rules_;
  if (!has_rule(axis::kData)) walk.insert(walk.end(), batch_rules().begin(), batch_rules().end());
  Sharding out;
  out.dims.resize(dims.size());
  std::vector<bool> assigned(dims.size(), false);
  std::vector<std::vector<std::string>> refused(dims.size());  // axes of the last rule that did not divide
  std::set<std::string> used;
  auto parts_of = [&](const std::vector<std::string>& axes) {
    int64_t parts = 1;
    for (const auto& a : axes) parts *= mesh.size(a);
    return parts;
  };
  auto free = [&](const std::vector<std::string>& axes) {
    return std::ranges::none_of(axes, [&](const auto& a) { return used.contains(a); });
  };
  auto assign = [&](size_t d, std::vector<std::string> axes) {
    used.insert(axes.begin(), axes.end());
    out.dims[d] = std::move(axes);
    assigned[d] = true;
    refused[d].clear();
  };
  for (const auto& rule : walk) {
    const auto at = std::find(names.begin(), names.end(), rule.logical);
    if (rule.logical.empty() || at == names.end()) continue;
    const auto d = static_cast<size_t>(at - names.begin());
    if (assigned[d]) continue;
    std::vector<std::string> axes = rule.mesh;
    std::erase_if(axes, [&](const auto& a) { return mesh.size(a) == 1; });
    if (!free(axes)) continue;
    if (dims[d] % parts_of(axes) == 0)
      assign(d, std::move(axes));
    else
      refused[d] = std::move(axes);
  }
  if (strict) {
    for (size_t d = 0; d < dims.size(); ++d)
      check(assigned[d] || refused[d].empty(), Code::invalid_config,
            "sharding: dim {} ('{}') of [{}] has size {}, which {} = {} devices do not divide", d, names[d],
            fmt::join(dims, ","), dims[d], fmt::join(refused[d], " × "), parts_of(refused[d]));
  }

  // A batch uses those of its axes that divide it; unused fsdp axes may shard the sequence.
  const auto batch = static_cast<size_t>(std::ranges::find_if(names, is_batch) - names.begin());
  const auto length = static_cast<size_t>(std::ranges::find_if(names, is_length) - names.begin());
  if (batch < dims.size() && !refused[batch].empty()) {
    std::vector<std::string> batch_axes, left, of_sequence;
    for (const auto& a : refused[batch]) {
      batch_axes.push_back(a);
      if (dims[batch] % parts_of(batch_axes) == 0) continue;
      batch_axes.pop_back();
      (sequences_ && a.starts_with("fsdp") ? of_sequence : left).push_back(a);
    }
    assign(batch, std::move(batch_axes));
    refused[batch] = std::move(left);
    if (length < dims.size() && !of_sequence.empty()) {
      std::vector<std::string> all = of_sequence;
      all.insert(all.end(), out.dims[length].begin(), out.dims[length].end());
      if (free(of_sequence) && dims[length] % parts_of(all) == 0)
        assign(length, std::move(all));
      else
        refused[length] = std::move(of_sequence);
    }
  }
  if (sequences_ && batch < dims.size() && length < dims.size()) {
    const bool rows = std::ranges::count(out.dims[batch], "fsdp") > 0;
    if (rows || std::ranges::count(out.dims[length], "fsdp") > 0)
      log_info_once("mesh: each device computes {1} of {0} samples ({2}); fsdp = {3} shards {4}", dims[batch],
                    dims[batch] / parts_of(out.dims[batch]), sizes(mesh, out.dims[batch]), mesh.size("fsdp"),
                    rows ? "its rows" : "the sequence of each sample");
  }
  for (size_t d = 0; d < dims.size(); ++d)
    if (!refused[d].empty() && (dims[d] > 1 || is_batch(names[d])))
      log_line_once(LogLevel::warning,
                    fmt::format("mesh: {} of size {} is replicated over {}, which does not divide it", names[d],
                                dims[d], sizes(mesh, refused[d])));
  return out;
}

}  // namespace md
