#include "maxdiffusion/nn/layers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/perturbation.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/conv.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/projection.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/ops/shape.h"

namespace md::nn {
namespace {

Tensor add_bias(const Scope& s, Tensor y) { return md::add_bias(y, s.param("bias", {y.dim(-1)}, {""}, init::zeros())); }

/// The product of a linear layer. Without logical axes, rows of x are sharded as batches, else as tokens.
Product projection(Precision precision, const LinearOptions& o) {
  const bool annotated = !o.in_axis.empty() || !o.out_axis.empty();
  return [precision, annotated, of_w = LogicalAxes{o.out_axis, o.in_axis}](Tensor x, Tensor weight) {
    LogicalAxes rows = {annotated ? axis::kBatch : axis::kData};
    if (annotated && x.rank() > 2) rows.push_back(axis::kLength);
    return project(x, weight, precision, rows, of_w);
  };
}

/// Whether `n` blocks below `s` are one loop. A repeat inside a stacked block is unrolled.
bool stacks_layers(const Scope& s, int64_t n) {
  return s.options().scan_layers && n > 1 && s.path().find('*') == std::string::npos;
}

/// Consecutive blocks that are one loop.
struct Layers {
  int64_t first = 0, count = 0;
  bool swapped = false;  // their frozen matrices are in the host's memory
};

/// The loops over `n` blocks below `s`: swapped blocks have their own.
std::vector<Layers> loops_of(const Scope& s, int64_t n) {
  const int64_t requested = s.swapped_blocks(n);  // also on CPUs: it registers the blocks
  const int64_t swapped =
      s.graph().options().platform == Platform::cpu ? 0 : requested;  // a CPU's memory is the host's
  std::vector<Layers> loops;
  if (swapped > 0) loops.push_back({0, swapped, true});
  if (swapped < n) loops.push_back({swapped, n - swapped});
  return loops;
}

/// The scope of the block of iteration `step`: its parameters are rows of stacked ones, `s / "*" / …`.
Scope stacked_layer(const Scope& s, const Layers& layers, ScanStep& step) {
  auto row = [&step, layers](const Scope& below, Param p) {
    p.in_host_memory = layers.swapped && !p.trainable && p.shape.rank() > 1;
    p.shape.dims.insert(p.shape.dims.begin(), layers.count);
    p.axes.insert(p.axes.begin(), "");
    p.stacked = layers.count;
    return step.slice(below.resolve(std::move(p)));
  };
  const Scope layer = (s / stacked_part(layers.first)).with_source(row).in_graph(step.body());
  return layer.random() ? layer.with_random(layer.random()->at_step(step.index())) : layer;
}

using Tensors = std::vector<Tensor>;

/// remat() for several values.
Tensors remat_all(const Scope& s, const std::function<Tensors(const Tensors&)>& f, const Tensors& xs) {
  const RematPolicy policy = remat_policy(s.options().remat, s.options().remat_names);
  if (!policy) return f(xs);
  auto block = [&](const Tensors& ys) {
    Tensors read;
    for (Tensor y : ys) read.push_back(named(y, value::kHiddenStates));
    return f(read);
  };
  return checkpoint(policy, block, xs);
}

/// The results of a block, with its inputs instead in the perturbed rows of the batch (ScopeOptions::perturbation).
/// xs, ys: [B, …], inputs and results; skipped: pred [], whether the block is skipped; absent: it is.
Tensors perturbed(const Scope& s, const Tensors& xs, Tensors ys, Tensor skipped = {}) {
  const auto& p = s.options().perturbation;
  for (size_t k = 0; k < ys.size(); ++k) {
    const int64_t rows = ys[k].dim(0);
    Tensor x = cast(slice_axis(xs[k], 0, p->first, rows), ys[k].dtype()), y = slice_axis(ys[k], 0, p->first, rows);
    if (skipped) x = where(broadcast_to(skipped, x.dims()), x, y);
    ys[k] = concatenate({slice_axis(ys[k], 0, 0, p->first), x}, 0);
  }
  return ys;
}

/// Whether some blocks below `s` are skipped.
bool skips_blocks(const Scope& s) {
  const auto& p = s.options().perturbation;
  return p && p->blocks == s.path() && !p->skipped.empty();
}

/// Adds to the perturbation the paths below `s` / "*" of attentions that are perturbed in all `n` stacked layers.
/// Throws invalid_config if an attention is perturbed in only some of them.
Scope with_stacked_perturbation(const Scope& s, int64_t n) {
  ScopeOptions o = s.options();
  if (!o.perturbation || o.perturbation->attentions.empty()) return s;
  Perturbation stacked = *o.perturbation;
  const std::string above = s.path() + ".";
  std::map<std::string, int64_t> layers;  // by the path below the layer
  for (const std::string& path : o.perturbation->attentions)
    if (path.starts_with(above)) ++layers[path.substr(std::min(path.find('.', above.size()), path.size()))];
  for (const auto& [below, count] : layers) {
    check(count == n, Code::invalid_config,
          "{}: the attention of {} of {} stacked blocks is perturbed; expected all or none, or scan_layers=false",
          s.path(), count, n);
    for (const Layers& layers : loops_of(s, n)) stacked.attentions.insert(above + stacked_part(layers.first) + below);
  }
  o.perturbation = std::make_shared<const Perturbation>(std::move(stacked));
  return s.with(o);
}

/// A block of all variants of repeat: gets the previous block's results and rows of `stacked`.
using BlockOfAll = std::function<Tensors(const Scope&, const Tensors& xs, const Tensors& rows)>;
Tensors repeat_all(const Scope& s, int64_t n, Tensors xs, const Tensors& stacked, const BlockOfAll& block,
                   int64_t from) {
  for (Tensor t : stacked)
    check(t.rank() > 0 && t.dim(0) == n, Code::invalid_graph, "repeat: rows of {} for {} blocks, at {}",
          to_string(t.shape()), n, s.path());
  auto region = [&block](const Scope& b, const Tensors& ys, const Tensors& rows) {
    return remat_all(
        b, [&](const Tensors& zs) { return block(b, zs, rows); }, ys);
  };
  if (!stacks_layers(s, n)) {
    for (int64_t i = from; i < n; ++i) {
      Tensors rows;
      for (Tensor t : stacked) rows.push_back(squeeze(slice_axis(t, 0, i, i + 1), 0));
      Tensors ys = region(s / i, xs, rows);
      xs = skips_blocks(s) && s.options().perturbation->skipped.contains(i) ? perturbed(s, xs, ys) : ys;
    }
    return xs;
  }
  check(from == 0, Code::internal, "repeat: {} stacked blocks begin with {}, at {}", n, from, s.path());
  const Scope of_layers = with_stacked_perturbation(s, n);
  Tensor skipped;  // pred [n]
  if (skips_blocks(s)) {
    HostArray flags(Shape{DType::f32, {n}});
    for (int64_t i = 0; i < n; ++i)
      flags.mutable_view<float>()[static_cast<size_t>(i)] = s.options().perturbation->skipped.contains(i) ? 1 : 0;
    skipped = constant(s.graph(), flags);
  }
  for (const Layers& layers : loops_of(s, n)) {
    const auto of_loop = [&](Tensor t) {
      return layers.count == n ? t : slice_axis(t, 0, layers.first, layers.first + layers.count);
    };
    Tensors of_rows;
    for (Tensor t : stacked) of_rows.push_back(of_loop(t));
    const Tensor flags = skipped ? of_loop(skipped) : Tensor();
    xs = scan(layers.count, xs, [&](ScanStep& step, const Tensors& carry) -> ScanResult {
           Tensors rows;
           for (Tensor t : of_rows) rows.push_back(step.slice(t));
           Tensors next = region(stacked_layer(of_layers, layers, step), carry, rows);
           if (!flags) return {.carry = next, .stacked = {}};
           Tensor flag = step.slice(flags);
           return {.carry = perturbed(s, carry, next, gt(flag, zeros_like(flag))), .stacked = {}};
         }).carry;
  }
  return xs;
}

/// Logical axes of the result of a convolution over `rank` − 2 axes, from those of its weight.
LogicalAxes axes_of_result(int64_t rank, const std::string& in_axis, const std::string& out_axis) {
  const bool annotated = !in_axis.empty() || !out_axis.empty();
  LogicalAxes axes(static_cast<size_t>(rank));
  axes.front() = annotated ? axis::kConvBatch : axis::kData;
  axes.back() = annotated ? axis::kOutChannels : "";
  return axes;
}

}  // namespace

Tensor linear(const Scope& s, Tensor x, const LinearOptions& o) {
  auto path = s.path_scope();
  const Dims dims = {o.out, x.dim(-1)};
  const Weight weight{"weight", dims, {o.out_axis, o.in_axis}, o.init ? *o.init : init::lecun_normal(dims)};
  Tensor y = s.product(weight, x, projection(s.options().precision, o));
  return o.bias ? add_bias(s, y) : y;
}

Tensor conv2d(const Scope& s, Tensor x, const Conv2dOptions& o) {
  auto path = s.path_scope();
  check(x.rank() == 4, Code::invalid_graph, "conv2d: x is {}, expected [B, H, W, C], at {}", to_string(x.shape()),
        s.path());
  const Dims dims = {o.out, x.dim(-1), o.kernel, o.kernel};
  const Weight weight{
      "weight", dims, {o.out_axis, o.in_axis, axis::kWindowHeight, axis::kWindowWidth}, init::lecun_normal(dims)};
  Tensor y = s.product(weight, x, [o, precision = s.options().precision](Tensor in, Tensor w) {
    const int64_t low = o.pad_right_bottom ? 0 : o.padding, high = o.pad_right_bottom ? 1 : o.padding;
    return conv(in, w,
                {.stride = {o.stride, o.stride},
                 .pad_low = {low, low},
                 .pad_high = {high, high},
                 .precision = precision,
                 .axes = axes_of_result(4, o.in_axis, o.out_axis)});
  });
  return o.bias ? add_bias(s, y) : y;
}

Tensor conv3d(const Scope& s, Tensor x, const Conv3dOptions& o) {
  auto path = s.path_scope();
  check(x.rank() == 5, Code::invalid_graph, "conv3d: x is {}, expected [B, F, H, W, C], at {}", to_string(x.shape()),
        s.path());
  const Dims dims = {o.out, x.dim(-1), o.kernel[0], o.kernel[1], o.kernel[2]};
  const Weight weight{"weight",
                      dims,
                      {o.out_axis, o.in_axis, axis::kWindowFrames, axis::kWindowHeight, axis::kWindowWidth},
                      init::lecun_normal(dims)};
  Tensor y = s.product(weight, x, [o, precision = s.options().precision](Tensor in, Tensor w) {
    return conv(in, w,
                {.stride = {o.stride.begin(), o.stride.end()},
                 .pad_low = {o.pad_low.begin(), o.pad_low.end()},
                 .pad_high = {o.pad_high.begin(), o.pad_high.end()},
                 .precision = precision,
                 .axes = axes_of_result(5, o.in_axis, o.out_axis)});
  });
  return o.bias ? add_bias(s, y) : y;
}

Tensor embedding(const Scope& s, Tensor ids, int64_t rows, int64_t width, Init init, int64_t added) {
  auto path = s.path_scope();
  const Tensor table = s.param("weight", {rows, width}, {"", ""}, init);
  if (added == 0) return cast(take(table, ids), s.dtype());
  const Tensor extra = s.param(kAddedRows, {added, width}, {"", ""}, init);
  const Tensor last = full(ids.graph(), static_cast<double>(rows - 1), ids.shape()),
               is_added = expand_dims(gt(ids, last), -1);
  const Tensor published = cast(take(table, minimum(ids, last)), s.dtype()),
               ours = cast(take(extra, maximum(ids - static_cast<double>(rows), full(ids.graph(), 0, ids.shape()))),
                           s.dtype());
  return where(broadcast_to(is_added, published.dims()), ours, published);
}

bool is_added_rows(const Param& p) { return p.path.ends_with(std::string(".") + kAddedRows); }
Scope with_added_rows_trained(const Scope& s) {
  return s.frozen().with_source([](const Scope& below, Param p) {
    if (!is_added_rows(p)) return below.resolve(std::move(p));
    ScopeOptions options = below.options();
    options.trainable = p.trainable = true;
    p.shape.dtype = DType::f32;
    return below.with(options).resolve(std::move(p));
  });
}
ParamTable without_added_rows(const ParamTable& params) {
  ParamTable out;
  for (const Param& p : params.params())
    if (!is_added_rows(p)) out.add(p);
  return out;
}

Tensor timestep_embedding(Tensor t, int64_t dim, bool flip_sin_to_cos, double freq_shift, double max_period) {
  check(t.rank() == 1, Code::invalid_graph, "timestep_embedding: t is {}, expected [B]", to_string(t.shape()));
  const int64_t half = dim / 2;
  HostArray table({DType::f32, {1, half}});
  auto f = table.mutable_view<float>();
  // Rounded to f32 at every step, as in the training of the published weights: at t = 1000 the last bit of a frequency
  // changes an angle by 6e-5.
  const auto log_period = static_cast<float>(std::log(max_period)),
             steps = static_cast<float>(static_cast<double>(half) - freq_shift);
  for (int64_t i = 0; i < half; ++i) f[static_cast<size_t>(i)] = std::exp(-log_period * static_cast<float>(i) / steps);
  Tensor angle = expand_dims(cast(t, DType::f32), 1) * constant(t.graph(), table);
  Tensor y = flip_sin_to_cos ? concatenate({cos(angle), sin(angle)}, 1) : concatenate({sin(angle), cos(angle)}, 1);
  return dim % 2 ? pad(y, 0, {0, 0}, {0, 1}) : y;
}

Tensor timestep_mlp(const Scope& s, Tensor x, int64_t width, const std::string& act) {
  Tensor h = linear(s / "linear_1", x, {.out = width});
  return linear(s / "linear_2", activation(act, h), {.out = width});
}

Tensor upsample_nearest(Tensor x) {
  const int64_t b = x.dim(0), h = x.dim(1), w = x.dim(2), c = x.dim(3);
  return reshape(broadcast_in_dim(x, {b, h, 2, w, 2, c}, {0, 1, 3, 5}), {b, 2 * h, 2 * w, c});
}

Tensor activation(const std::string& name, Tensor x) {
  if (name == "silu" || name == "swish") return silu(x);
  if (name == "gelu") return gelu(x);
  if (name == "quick_gelu") return quick_gelu(x);
  if (name == "gelu_tanh" || name == "gelu_new" || name == "gelu_pytorch_tanh") return gelu_tanh(x);
  if (name == "relu") return relu(x);
  // softplus(x) = max(x, 0) + log(1 + exp(−|x|)), which does not overflow.
  if (name == "mish") return x * tanh(relu(x) + log1p(exp(-abs(x))));
  fail(Code::invalid_config, "activation is '{}'; expected one of: {}", name,
       nearest_first(name, {"silu", "swish", "gelu", "quick_gelu", "gelu_tanh", "gelu_new", "gelu_pytorch_tanh", "relu",
                            "mish"}));
}

Tensor dropout(const Scope& s, Tensor x) {
  const double p = s.options().dropout;
  if (p == 0 || !s.random()) return x;
  auto path = s.path_scope();
  const Tensor uniform = random_uniform(s.random()->for_(s.path()), {DType::f32, x.dims()});
  const Tensor keep = ge(uniform, scalar_like(uniform, p));
  return named(where(keep, x / (1 - p), zeros_like(x)), kDropout);
}

Tensor remat(const Scope& s, const std::function<Tensor(Tensor)>& f, Tensor x) {
  return remat_all(s, [&f](const Tensors& xs) { return Tensors{f(xs[0])}; }, {x})[0];
}

Tensor repeat(const Scope& s, int64_t n, Tensor x, const Block& block, int64_t from) {
  return repeat(
      s, n, x, {}, [&block](const Scope& b, Tensor y, const Tensors&) { return block(b, y); }, from);
}

Tensor repeat(const Scope& s, int64_t n, Tensor x, const std::vector<Tensor>& stacked, const BlockOfRows& block,
              int64_t from) {
  return repeat_all(
      s, n, {x}, stacked,
      [&block](const Scope& b, const Tensors& xs, const Tensors& rows) { return Tensors{block(b, xs[0], rows)}; },
      from)[0];
}

std::vector<Tensor> repeat(const Scope& s, int64_t n, const std::vector<Tensor>& xs, const BlockOfStreams& block,
                           int64_t from) {
  return repeat_all(
      s, n, xs, {}, [&block](const Scope& b, const Tensors& ys, const Tensors&) { return block(b, ys); }, from);
}

std::vector<Tensor> per_layer(const Scope& s, int64_t n, const LayerResults& f) {
  std::vector<std::vector<Tensor>> layers;  // for each result
  if (stacks_layers(s, n)) {
    for (const Layers& loop : loops_of(s, n)) {
      const auto of_loop = scan(loop.count, {constant(s.graph(), 0)},  // a scan needs a carry: a dummy
                                [&](ScanStep& step, const std::vector<Tensor>& nothing) -> ScanResult {
                                  return {nothing, f(stacked_layer(s, loop, step))};
                                })
                               .stacked;
      layers.resize(of_loop.size());
      for (size_t k = 0; k < of_loop.size(); ++k) layers[k].push_back(of_loop[k]);
    }
    std::vector<Tensor> all;
    for (const std::vector<Tensor>& of_one : layers)
      all.push_back(of_one.size() == 1 ? of_one[0] : concatenate(of_one, 0));
    return all;
  }
  for (int64_t i = 0; i < n; ++i) {
    const std::vector<Tensor> results = f(s / i);
    layers.resize(results.size());
    for (size_t k = 0; k < results.size(); ++k) layers[k].push_back(results[k]);
  }
  std::vector<Tensor> out;
  for (const std::vector<Tensor>& of_one : layers) out.push_back(stack(of_one, 0));
  return out;
}

}  // namespace md::nn
