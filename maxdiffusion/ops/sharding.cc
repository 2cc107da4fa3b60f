#include "maxdiffusion/ops/sharding.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/clone.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

using AxisNames = std::vector<std::string>;

int64_t axis_size(const GraphOptions& o, const std::string& axis) { return devices_along(o, {axis}); }
/// Distance in mesh order between neighbours along the axis: the first axis is the slowest.
int64_t axis_stride(const GraphOptions& o, const std::string& axis) {
  int64_t stride = 1;
  for (size_t i = o.mesh_axes.size(); i-- > 0 && o.mesh_axes[i].first != axis;) stride *= o.mesh_axes[i].second;
  return stride;
}
/// Devices in mesh order, grouped by these axes: each group has all positions along them, the last axis varies fastest.
std::vector<std::vector<int64_t>> axis_groups(const GraphOptions& o, const AxisNames& axes) {
  std::vector<int64_t> steps = {0};  // from the first device of a group
  for (const std::string& axis : axes) {
    std::vector<int64_t> finer;
    for (int64_t step : steps)
      for (int64_t k = 0; k < axis_size(o, axis); ++k) finer.push_back(step + k * axis_stride(o, axis));
    steps = std::move(finer);
  }
  auto is_first = [&](int64_t d) {
    return std::ranges::all_of(axes, [&](const auto& a) { return d / axis_stride(o, a) % axis_size(o, a) == 0; });
  };
  std::vector<std::vector<int64_t>> groups;
  for (int64_t d = 0; d < o.devices(); ++d) {
    if (!is_first(d)) continue;
    groups.emplace_back();
    for (int64_t step : steps) groups.back().push_back(d + step);
  }
  return groups;
}

std::string mlir_table(const std::vector<std::vector<int64_t>>& rows) {
  std::string text;
  for (const auto& row : rows) text += fmt::format("{}[{}]", text.empty() ? "" : ", ", fmt::join(row, ", "));
  return fmt::format("dense<[{}]> : tensor<{}x{}xi64>", text, rows.size(), rows[0].size());
}

// --- Constraints -----------------------------------------------------------------------------------------------------

/// Mesh axes of the value and of its cotangent.
struct Constraint {
  DimAxes value, cotangent;
};

constexpr OpDef kShardingConstraint = {
    .name = "sharding_constraint",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit =
        [](EmitCtx& c) {
          const std::string sharding = sdy_sharding(c.attrs<Constraint>().value, c.out().rank());
          c.simple("sdy.sharding_constraint", "sharding = #sdy.sharding" + sharding);
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& a = c.attrs<Constraint>();
      return Grads{shard_axes(c.dy(), a.cotangent, a.value)};
    },
    .shardings = [](const Node& n) { return std::vector<DimAxes>{n.attrs<Constraint>().value}; },
};

// --- Collectives -----------------------------------------------------------------------------------------------------

struct Collective {
  AxisNames axes;  // one, except of all_reduce
  int64_t size = 1;
  int64_t dim = 0, other = 0;  // of the tensor; all_to_all: split and concatenated
  int64_t shift = 0;
};

/// Replica groups and channel. Ids are positions in mesh order, as in the device assignment.
std::string group_attributes(const EmitCtx& c, bool global_ids) {
  std::string text =
      fmt::format("replica_groups = {}, channel_handle = #stablehlo.channel_handle<handle = {}, type = 1>",
                  mlir_table(axis_groups(c.options(), c.attrs<Collective>().axes)), c.node().id + 1);
  return global_ids ? text + ", use_global_device_ids" : text;
}

std::string sum_region(EmitCtx& c) {
  const Shape scalar{c.out().dtype, {}};
  return c.region({scalar, scalar}, [&](EmitCtx& r, const std::vector<Value>& v) {
    return std::vector<Value>{r.emit("stablehlo.add", {v[0], v[1]}, scalar)};
  });
}

constexpr OpDef kAllReduce = {
    .name = "all_reduce",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit =
        [](EmitCtx& c) {
          const std::string region = sum_region(c);
          c.set_out(c.emit_multi("stablehlo.all_reduce", {c.in()}, {c.out()}, group_attributes(c, true), {region})[0]);
        },
    .vjp = [](const VjpCtx& c) -> Grads { return {all_reduce_sum(c.dy(), c.attrs<Collective>().axes)}; },
};

constexpr OpDef kAllGather = {
    .name = "all_gather",
    .infer =
        [](const InferCtx& c) {
          const auto& a = c.attrs<Collective>();
          Shape s = c.in[0];
          s.dims[static_cast<size_t>(a.dim)] *= a.size;
          return std::vector<Shape>{s};
        },
    .emit =
        [](EmitCtx& c) {
          c.simple("stablehlo.all_gather",
                   fmt::format("all_gather_dim = {} : i64, {}", c.attrs<Collective>().dim, group_attributes(c, true)));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& a = c.attrs<Collective>();
      return {reduce_scatter(c.dy(), a.axes[0], a.dim)};
    },
};

int64_t divided(const InferCtx& c, int64_t dim) {
  const auto& a = c.attrs<Collective>();
  check(c.in[0].dim(dim) % a.size == 0, Code::invalid_graph, "{}: axis {} of {} does not divide by {} = {} devices",
        c.op.name, dim, to_string(c.in[0]), a.axes[0], a.size);
  return c.in[0].dim(dim) / a.size;
}

constexpr OpDef kReduceScatter = {
    .name = "reduce_scatter",
    .infer =
        [](const InferCtx& c) {
          Shape s = c.in[0];
          const int64_t dim = c.attrs<Collective>().dim;
          s.dims[static_cast<size_t>(dim)] = divided(c, dim);
          return std::vector<Shape>{s};
        },
    .emit =
        [](EmitCtx& c) {
          const std::string region = sum_region(c);
          c.set_out(c.emit_multi(
              "stablehlo.reduce_scatter", {c.in()}, {c.out()},
              fmt::format("scatter_dimension = {} : i64, {}", c.attrs<Collective>().dim, group_attributes(c, true)),
              {region})[0]);
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& a = c.attrs<Collective>();
      return {all_gather(c.dy(), a.axes[0], a.dim)};
    },
};

constexpr OpDef kCollectivePermute = {
    .name = "collective_permute",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit =
        [](EmitCtx& c) {
          const auto& a = c.attrs<Collective>();
          std::vector<std::vector<int64_t>> pairs;
          for (const auto& group : axis_groups(c.options(), a.axes))
            for (int64_t k = 0; k < a.size; ++k)
              pairs.push_back({group[static_cast<size_t>(k)], group[static_cast<size_t>((k + a.shift) % a.size)]});
          c.simple("stablehlo.collective_permute",
                   fmt::format("source_target_pairs = {}, channel_handle = #stablehlo.channel_handle<handle = {}, "
                               "type = 1>",
                               mlir_table(pairs), c.node().id + 1));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& a = c.attrs<Collective>();
      return {collective_permute(c.dy(), a.axes[0], -a.shift)};
    },
};

constexpr OpDef kAllToAll = {
    .name = "all_to_all",
    .infer =
        [](const InferCtx& c) {
          const auto& a = c.attrs<Collective>();
          Shape s = c.in[0];
          s.dims[static_cast<size_t>(a.dim)] = divided(c, a.dim);
          s.dims[static_cast<size_t>(a.other)] *= a.size;
          return std::vector<Shape>{s};
        },
    .emit =
        [](EmitCtx& c) {
          const auto& a = c.attrs<Collective>();
          c.simple("stablehlo.all_to_all",
                   fmt::format("split_dimension = {} : i64, concat_dimension = {} : i64, split_count = {} : i64, {}",
                               a.dim, a.other, a.size, group_attributes(c, false)));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& a = c.attrs<Collective>();
      return {all_to_all(c.dy(), a.axes[0], a.other, a.dim)};
    },
};

// The partitioner rejects partition_id if it partitions some of the axes, so manual_computation passes the position as
// an input.
constexpr OpDef kAxisIndex = {
    .name = "axis_index",
    .infer =
        [](const InferCtx&) {
          return std::vector<Shape>{{DType::s32, {}}};
        },
    .emit = [](EmitCtx& c) { c.set_out(c.scoped("index of " + c.attrs<Collective>().axes[0])); },
    .vjp = no_gradient,
};

bool uses_axis_index(const Graph& body, const std::string& axis) {
  for (const auto& n : body.nodes()) {
    if (n->op == &kAxisIndex && n->attrs<Collective>().axes[0] == axis) return true;
    for (const auto& inner : n->bodies)
      if (uses_axis_index(*inner, axis)) return true;
  }
  return false;
}

Collective along(Tensor x, const std::string& axis) { return {{axis}, axis_size(x.graph().options(), axis)}; }

// --- Manual computation ----------------------------------------------------------------------------------------------

struct Manual {
  std::vector<DimAxes> in, out;
  std::vector<std::string> axes;  // in mesh order, each of more than one device
  std::vector<Shape> outputs;
};

/// Manual axes that do not shard this value: every device along them holds all of it.
std::vector<std::string> unsplit(const std::vector<std::string>& manual, const DimAxes& axes) {
  std::vector<std::string> rest;
  for (const std::string& a : manual) {
    bool used = false;
    for (const auto& dim : axes) used |= std::find(dim.begin(), dim.end(), a) != dim.end();
    if (!used) rest.push_back(a);
  }
  return rest;
}

Shape local_shape(const GraphOptions& o, Shape s, const DimAxes& axes, const std::vector<std::string>& manual) {
  check(axes.size() <= s.dims.size(), Code::invalid_graph, "manual_computation: {} lists of mesh axes for {}",
        axes.size(), to_string(s));
  for (size_t i = 0; i < axes.size(); ++i)
    for (const std::string& a : axes[i]) {
      const int64_t n = axis_size(o, a);
      check(n == 1 || std::find(manual.begin(), manual.end(), a) != manual.end(), Code::invalid_graph,
            "manual_computation: mesh axis '{}' splits an argument but is not manual", a);
      check(s.dims[i] % n == 0, Code::invalid_graph, "manual_computation: axis {} of {} does not divide by {} = {}", i,
            to_string(s), a, n);
      s.dims[i] /= n;
    }
  return s;
}
Shape global_shape(const GraphOptions& o, Shape s, const DimAxes& axes) {
  for (size_t i = 0; i < axes.size(); ++i)
    for (const std::string& a : axes[i]) s.dims.at(i) *= axis_size(o, a);
  return s;
}

/// `<@mesh, [{"data", ?}, {?}], replicated={"tensor"}>`: the compiler may also shard along axes that are not manual.
std::string manual_sharding(const GraphOptions& o, const DimAxes& axes, int64_t rank,
                            const std::vector<std::string>& manual) {
  const bool all = std::all_of(o.mesh_axes.begin(), o.mesh_axes.end(), [&](const auto& a) {
    return a.second == 1 || std::find(manual.begin(), manual.end(), a.first) != manual.end();
  });
  std::string dims;
  for (int64_t i = 0; i < rank; ++i) {
    std::vector<std::string> words;
    if (static_cast<size_t>(i) < axes.size())
      for (const std::string& a : axes[static_cast<size_t>(i)])
        if (axis_size(o, a) > 1) words.push_back('"' + a + '"');
    if (!all) words.push_back("?");
    dims += fmt::format("{}{{{}}}", i ? ", " : "", fmt::join(words, ", "));
  }
  std::vector<std::string> whole;
  for (const std::string& a : unsplit(manual, axes)) whole.push_back('"' + a + '"');
  return fmt::format("<@mesh, [{}]{}>", dims,
                     whole.empty() ? "" : fmt::format(", replicated={{{}}}", fmt::join(whole, ", ")));
}

void emit_manual(EmitCtx& c) {
  const auto& a = c.attrs<Manual>();
  const GraphOptions& options = c.options();
  const Graph& body = *c.node().bodies[0];
  std::vector<Value> in;
  std::vector<Shape> arguments;
  std::string in_shardings, out_shardings, axes;
  auto list = [](std::string& text, const std::string& entry) { text += (text.empty() ? "" : ", ") + entry; };
  for (int i = 0; i < c.in_count(); ++i) {
    in.push_back(c.in(i));
    arguments.push_back(body.arguments()[static_cast<size_t>(i)].shape());
    list(in_shardings, manual_sharding(options, a.in[static_cast<size_t>(i)], in.back().shape.rank(), a.axes));
  }
  // Positions along axes: 0 … n−1, sharded along the axis, so that each device has one element.
  std::vector<std::string> indexed;
  for (const std::string& axis : a.axes) {
    list(axes, '"' + axis + '"');
    if (!uses_axis_index(body, axis)) continue;
    indexed.push_back(axis);
    in.push_back(c.emit("stablehlo.iota", {}, {DType::s32, {axis_size(options, axis)}}, "iota_dimension = 0 : i64"));
    arguments.push_back({DType::s32, {1}});
    list(in_shardings, manual_sharding(options, {{axis}}, 1, a.axes));
  }
  for (size_t i = 0; i < a.out.size(); ++i)
    list(out_shardings, manual_sharding(options, a.out[i], a.outputs[i].rank(), a.axes));

  auto fill = [&](EmitCtx& r, const std::vector<Value>& args) {
    const size_t body_arguments = body.arguments().size();
    for (size_t k = 0; k < indexed.size(); ++k)
      r.set_scoped("index of " + indexed[k], r.emit("stablehlo.reshape", {args[body_arguments + k]}, {DType::s32, {}}));
    return r.inline_body(body, {args.begin(), args.begin() + static_cast<int64_t>(body_arguments)});
  };
  const std::string region = c.region(arguments, fill, "sdy.return", true);
  auto out = c.emit_multi("sdy.manual_computation", in, c.node().outputs,
                          fmt::format("in_shardings = #sdy.sharding_per_value<[{}]>, "
                                      "out_shardings = #sdy.sharding_per_value<[{}]>, "
                                      "manual_axes = #sdy<manual_axes{{{}}}>",
                                      in_shardings, out_shardings, axes),
                          {region});
  for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
}

// Per device: the body again, then its gradient. The cotangent of a result that is replicated along an axis is divided
// by the number of its devices; the cotangent of a replicated argument is summed over them.
Grads manual_vjp(const VjpCtx& c) {
  const auto& a = c.attrs<Manual>();
  const Graph& body = *c.view().home(const_cast<Node&>(c.node())).bodies[0];
  const GraphOptions& options = c.into().options();
  std::vector<Tensor> inputs;
  std::vector<DimAxes> in = a.in, out;
  std::vector<size_t> with_dy, differentiated;
  for (size_t i = 0; i < c.in_count(); ++i) inputs.push_back(c.in(static_cast<int>(i)));
  for (size_t i = 0; i < c.out_count(); ++i) {
    Tensor dy = c.dy(static_cast<int>(i));
    if (!dy) continue;
    inputs.push_back(dy);
    in.push_back(a.out[i]);
    with_dy.push_back(i);
  }
  for (size_t i = 0; i < c.in_count(); ++i) {
    if (!c.needs(static_cast<int>(i))) continue;
    differentiated.push_back(i);
    out.push_back(a.in[i]);
  }
  auto dxs = manual_computation(inputs, in, out, a.axes, [&](const std::vector<Tensor>& args) {
    std::map<Tensor, Tensor> bound;
    for (size_t i = 0; i < body.arguments().size(); ++i) bound[body.arguments()[i]] = args[i];
    Graph& into = args[0].graph();
    const std::vector<Tensor> results = clone_results(body, into, [&](Tensor t) { return bound.at(t); });
    std::vector<Tensor> ys, xs;
    Grads dys;
    for (size_t k = 0; k < with_dy.size(); ++k) {
      const auto holders = static_cast<double>(devices_along(options, unsplit(a.axes, a.out[with_dy[k]])));
      Tensor dy = args[c.in_count() + k];
      ys.push_back(results[with_dy[k]]);
      dys.push_back(holders > 1 ? dy * (1 / holders) : dy);
    }
    for (size_t i : differentiated) xs.push_back(args[i]);
    DirectView direct;
    Grads g = c.sweep()(ys, dys, xs, into, direct);
    for (size_t k = 0; k < g.size(); ++k) {
      if (!g[k]) g[k] = zeros_like(xs[k]);
      g[k] = all_reduce_sum(g[k], unsplit(a.axes, a.in[differentiated[k]]));
    }
    return g;
  });
  Grads grads(c.in_count());
  for (size_t k = 0; k < differentiated.size(); ++k) grads[differentiated[k]] = dxs[k];
  return grads;
}

const OpDef kManualComputation = {
    .name = "manual_computation",
    .infer = [](const InferCtx& c) { return c.attrs<Manual>().outputs; },
    .emit = emit_manual,
    .vjp = manual_vjp,
    .flops =
        [](const Node& n) {
          // Replicated work is not counted more than once.
          const auto& a = n.attrs<Manual>();
          AxisNames split;
          for (const auto* all : {&a.in, &a.out})
            for (const DimAxes& dims : *all)
              for (const auto& axes : dims) split.insert(split.end(), axes.begin(), axes.end());
          return static_cast<double>(devices_along(n.graph->options(), split)) *
                 count_flops(*n.bodies[0], n.bodies[0]->results);
        },
    .shardings =
        [](const Node& n) {
          std::vector<DimAxes> all = n.attrs<Manual>().in;
          all.insert(all.end(), n.attrs<Manual>().out.begin(), n.attrs<Manual>().out.end());
          return all;
        },
};

}  // namespace

int64_t devices_along(const GraphOptions& o, const std::vector<std::string>& axes) {
  int64_t n = 1;
  for (const auto& [name, size] : o.mesh_axes) n *= std::ranges::count(axes, name) > 0 ? size : 1;
  return n;
}

Tensor shard(Tensor x, const LogicalAxes& names) {
  const Graph& g = x.graph();
  check(names.size() == x.dims().size(), Code::invalid_graph, "shard: {} logical axes for {}, at {}", names.size(),
        to_string(x.shape()), g.path());
  if (!g.options().resolve) return x;
  DimAxes axes;
  try {
    axes = g.options().resolve(names, x.dims());
  } catch (Error& e) {
    if (!g.path().empty()) e.note("at " + g.path());
    throw;
  }
  return shard_axes(x, std::move(axes));
}

Tensor shard_axes(Tensor x, DimAxes axes) {
  DimAxes cotangent = axes;
  return shard_axes(x, std::move(axes), std::move(cotangent));
}

Tensor shard_axes(Tensor x, DimAxes axes, DimAxes cotangent) {
  if (x.graph().options().devices() == 1) return x;
  return apply(kShardingConstraint, {x}, Constraint{std::move(axes), std::move(cotangent)});
}

DimAxes axes_in_use(Tensor weight, const LogicalAxes& names) {
  const GraphOptions& o = weight.graph().options();
  if (o.devices() == 1 || !o.resolve || names.empty()) return DimAxes(weight.dims().size());
  DimAxes used = o.resolve(names, weight.dims());
  for (auto& axes : used) std::erase_if(axes, [](const std::string& a) { return a != "tensor"; });
  return used;
}

Tensor gather_weight(Tensor weight, const LogicalAxes& names) {
  const GraphOptions& o = weight.graph().options();
  if (o.devices() == 1 || !o.resolve || names.empty()) return weight;
  const DimAxes stored = o.resolve(names, weight.dims()), used = axes_in_use(weight, names);
  if (used == stored) return weight;
  // An array computed from a stored weight gets the weight's sharding; otherwise the partitioner would gather the
  // weight, which may be wider.
  if (weight.node()->op != &kParameter) weight = shard_axes(weight, stored);
  return shard_axes(weight, used, stored);
}

Tensor shard_as_stored(Tensor gradient, const LogicalAxes& names) {
  const GraphOptions& o = gradient.graph().options();
  if (o.devices() == 1 || !o.resolve || names.empty()) return gradient;
  return shard_axes(gradient, o.resolve(names, gradient.dims()));
}

std::vector<Tensor> manual_computation(const std::vector<Tensor>& inputs, const std::vector<DimAxes>& in,
                                       const std::vector<DimAxes>& out, const std::vector<std::string>& manual,
                                       const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& body) {
  check(!inputs.empty() && inputs.size() == in.size(), Code::invalid_graph,
        "manual_computation: {} inputs, {} shardings for them", inputs.size(), in.size());
  Graph& parent = innermost(inputs);
  const GraphOptions& options = parent.options();
  Manual attrs{in, out, {}, {}};
  for (const auto& [name, size] : options.mesh_axes)
    if (size > 1 && std::find(manual.begin(), manual.end(), name) != manual.end()) attrs.axes.push_back(name);
  if (attrs.axes.empty()) return body(inputs);  // a single device along every axis: collectives are identities

  GraphOptions inner = options;
  inner.resolve = nullptr;  // constraints are for whole arrays
  inner.manual = std::ranges::all_of(
      options.mesh_axes, [&](const auto& a) { return a.second == 1 || std::ranges::count(attrs.axes, a.first) > 0; });
  auto graph = std::make_shared<Graph>(parent, std::move(inner));
  std::vector<Tensor> arguments, operands;
  for (size_t i = 0; i < inputs.size(); ++i) {
    arguments.push_back(graph->argument(local_shape(options, inputs[i].shape(), in[i], attrs.axes)));
    operands.push_back(parent.capture(inputs[i]));
  }
  for (Tensor t : body(arguments)) graph->results.push_back(graph->capture(t));
  check(graph->results.size() == out.size(), Code::invalid_graph,
        "manual_computation: {} results, {} shardings for them", graph->results.size(), out.size());
  for (size_t i = 0; i < out.size(); ++i)
    attrs.outputs.push_back(global_shape(options, graph->results[i].shape(), out[i]));
  graph->prune_captures(live_nodes(*graph, graph->results));
  for (const auto& [outer, unused] : graph->captures())
    fail(Code::invalid_graph,
         "manual_computation: the body uses {} {} from outside; pass it as an input, with its sharding",
         outer.node()->op->name, to_string(outer.shape()));
  Node* node = parent.add(kManualComputation, std::move(operands), std::move(attrs), {graph});
  std::vector<Tensor> results;
  for (size_t i = 0; i < node->outputs.size(); ++i) results.push_back(node->out(static_cast<int>(i)));
  return results;
}

Tensor all_reduce_sum(Tensor x, const std::vector<std::string>& axes) {
  Collective a{axes, devices_along(x.graph().options(), axes)};
  return a.size == 1 ? x : apply(kAllReduce, {x}, a);
}
Tensor all_gather(Tensor x, const std::string& axis, int64_t dim) {
  Collective a = along(x, axis);
  a.dim = normalize_axis(dim, x.rank());
  return a.size == 1 ? x : apply(kAllGather, {x}, a);
}
Tensor reduce_scatter(Tensor x, const std::string& axis, int64_t dim) {
  Collective a = along(x, axis);
  a.dim = normalize_axis(dim, x.rank());
  return a.size == 1 ? x : apply(kReduceScatter, {x}, a);
}
Tensor collective_permute(Tensor x, const std::string& axis, int64_t shift) {
  Collective a = along(x, axis);
  a.shift = (shift % a.size + a.size) % a.size;
  return a.shift == 0 ? x : apply(kCollectivePermute, {x}, a);
}
Tensor all_to_all(Tensor x, const std::string& axis, int64_t split_dim, int64_t concat_dim) {
  Collective a = along(x, axis);
  a.dim = normalize_axis(split_dim, x.rank());
  a.other = normalize_axis(concat_dim, x.rank());
  return a.size == 1 ? x : apply(kAllToAll, {x}, a);
}
Tensor axis_index(Graph& g, const std::string& axis) {
  Collective a{{axis}, axis_size(g.options(), axis)};
  return a.size == 1 ? constant(g, 0, DType::s32) : apply_in(g, kAxisIndex, a);
}

OpList sharding_ops() {
  return {&kShardingConstraint, &kAllReduce, &kAllGather, &kReduceScatter,
          &kCollectivePermute,  &kAllToAll,  &kAxisIndex, &kManualComputation};
}

}  // namespace md
