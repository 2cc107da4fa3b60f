// Normalization. Statistics are f32 and computed in two passes (mean, then the centred square), because a single pass
// over x and x² loses the variance of a signal with a large mean. The gradient is explicit: it stores only x and the
// statistics, and has a third of the operations of the differentiated forward pass. The CPU kernels compute the same.
#include <fmt/format.h>

#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/kernel_table.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md::nn {
namespace {

constexpr double kSmallestNorm = 1e-12;  // lower bound of unit_norm's divisor

Tensor f32(Tensor x) { return cast(x, DType::f32); }

/// (x − mean) / sqrt(var + eps) · w + b over the last axis.   w, b: f32 [C].
Tensor normalize_last(Tensor x, Tensor w, Tensor b, double eps) {
  const Axes last = {x.rank() - 1};
  auto forward = [=](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    Tensor v = f32(in[0]), m = mean(v, last, true), c = v - m;
    Tensor r = rsqrt(mean(square(c), last, true) + eps);
    return {cast(c * r * in[1] + in[2], in[0].dtype()), m, r};
  };
  auto backward = [=](const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
    Tensor r = out[2], dy = f32(dys[0]), n = (f32(in[0]) - out[1]) * r, g = dy * in[1];
    Tensor dx = r * (g - mean(g, last, true) - n * mean(g * n, last, true));
    Axes rest;
    for (int64_t i = 0; i < last[0]; ++i) rest.push_back(i);
    return {cast(dx, in[0].dtype()), sum(dy * n, rest), sum(dy, rest)};
  };
  return custom_vjp({x, w, b}, forward, backward)[0];
}

/// (x − mean) / sqrt(var + eps) · w + b with mean and var over space and a group's channels.   x: [B, space…, C]   w,
/// b: f32 [C]. Sums are over space first and over the group after, because on CPUs a loop with channels as its
/// innermost axis is twice as fast as one over both. The sums over space of the backward pass serve dx, dw and db.
Tensor normalize_groups(Tensor x, Tensor w, Tensor b, int64_t groups, double eps) {
  const int64_t batch = x.dim(0), width = x.dim(-1), space = x.shape().elements() / (batch * width);
  const int64_t of_group = width / groups;
  const double count = static_cast<double>(space * of_group);
  auto flattened = [=](Tensor t) { return reshape(f32(t), {batch, space, width}); };
  // Sums over space [B, C] → means of the groups, repeated for each of their channels [B, 1, C].
  auto group_mean = [=](Tensor sums) {
    const Dims grouped = {batch, groups, width / groups};
    Tensor m = sum(reshape(sums, grouped), {2}, true) * (1 / count);
    return reshape(broadcast_to(m, grouped), {batch, 1, width});
  };
  auto forward = [=](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    Tensor v = flattened(in[0]), m = group_mean(sum(v, {1})), c = v - m;
    Tensor r = rsqrt(group_mean(sum(square(c), {1})) + eps);
    return {cast(reshape(c * (r * in[1]) + in[2], in[0].dims()), in[0].dtype()), m, r};
  };
  auto backward = [=](const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
    Tensor r = out[2], dy = flattened(dys[0]), n = (flattened(in[0]) - out[1]) * r;
    Tensor sums = sum(dy, {1}), products = sum(dy * n, {1});
    Tensor dx = r * (dy * in[1] - group_mean(sums * in[1]) - n * group_mean(products * in[1]));
    return {cast(reshape(dx, in[0].dims()), in[0].dtype()), sum(products, {0}), sum(sums, {0})};
  };
  return custom_vjp({x, w, b}, forward, backward)[0];
}

/// As normalize_last. `axes`: mesh axes of x; its last dim is replicated.
Tensor last_by_kernel(Tensor x, Tensor w, Tensor b, double eps, const DimAxes& axes) {
  DimAxes rows(1);  // of the statistics; only the kernel's gradient reads them, in each device's own order
  for (const auto& of_dim : axes) rows[0].insert(rows[0].end(), of_dim.begin(), of_dim.end());
  auto forward = [=](const std::vector<Tensor>& in) {
    return per_device(in, {axes, {}, {}}, {axes, rows, rows}, [&](const std::vector<Tensor>& part) {
      const Shape statistics{DType::f32, {part[0].shape().elements() / part[0].dim(-1)}};
      return custom_call(part[0].graph(), part,
                         {.target = kLayerNormKernel,
                          .results = {part[0].shape(), statistics, statistics},
                          .backend_config = fmt::format("eps = {:.17e} : f64", eps)});
    });
  };
  auto backward = [=](const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
    return per_device({in[0], dys[0], in[1], out[1], out[2]}, {axes, axes, {}, rows, rows}, {axes, {}, {}},
                      [](const std::vector<Tensor>& part) {
                        return custom_call(part[0].graph(), part,
                                           {.target = kLayerNormGradKernel,
                                            .results = {part[0].shape(), part[2].shape(), part[2].shape()},
                                            .backend_config = {}});
                      });
  };
  return custom_vjp({x, w, b}, forward, backward)[0];
}

/// As normalize_groups, followed by SiLU if `silu`. `axes`: mesh axes that shard x along batch and channels; channels
/// are replicated if a group would span devices.
Tensor groups_by_kernel(Tensor x, Tensor w, Tensor b, int64_t groups, double eps, bool silu, DimAxes axes) {
  const int64_t shares = devices_along(x.graph().options(), axes.back());
  if (groups % shares == 0)
    groups /= shares;
  else
    axes.back().clear();
  const DimAxes channels = {axes.back()}, statistics = {axes.front(), axes.back()};
  const std::string config = fmt::format("groups = {} : i64, silu = {}", groups, silu);
  auto forward = [=](const std::vector<Tensor>& in) {
    return per_device(in, {axes, channels, channels}, {axes, statistics, statistics},
                      [&](const std::vector<Tensor>& part) {
                        const Shape of_groups{DType::f32, {part[0].dim(0), groups}};
                        return custom_call(part[0].graph(), part,
                                           {.target = kGroupNormKernel,
                                            .results = {part[0].shape(), of_groups, of_groups},
                                            .backend_config = config + fmt::format(", eps = {:.17e} : f64", eps)});
                      });
  };
  auto backward = [=](const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
    return per_device({in[0], dys[0], in[1], in[2], out[1], out[2]},
                      {axes, axes, channels, channels, statistics, statistics}, {axes, channels, channels},
                      [&](const std::vector<Tensor>& part) {
                        return custom_call(part[0].graph(), part,
                                           {.target = kGroupNormGradKernel,
                                            .results = {part[0].shape(), part[2].shape(), part[3].shape()},
                                            .backend_config = config});
                      });
  };
  return custom_vjp({x, w, b}, forward, backward)[0];
}

// ---- the tables

struct LayerNormCall {
  Tensor x, w, b;
  double eps;
  /// Mesh axes that shard x; rows are sharded as in attention.
  DimAxes axes() const {
    LogicalAxes names(x.dims().size());
    names[0] = axis::kBatch;
    if (names.size() > 2) names[1] = axis::kLength;
    names.back() = "";
    return dim_axes(x, names);
  }
};
constexpr KernelRow<LayerNormCall, Tensor> kLayerNorms[] = {
    {kLayerNormKernel,
     [](const LayerNormCall& c) { return kernels_support_shards({c.x}) ? nullptr : kNoPartsForCpuKernels; },
     [](const LayerNormCall& c) { return last_by_kernel(c.x, c.w, c.b, c.eps, c.axes()); }},
    {"composed", never, [](const LayerNormCall& c) { return normalize_last(c.x, c.w, c.b, c.eps); }},
};

struct GroupNormCall {
  Tensor x, w, b;
  int64_t groups;
  double eps;
  const std::string& activation;  // of the result; empty: none
  bool annotated;                 // batch and channels are sharded as in annotated convolutions
  DimAxes axes() const {
    LogicalAxes names(x.dims().size());
    names[0] = annotated ? axis::kConvBatch : axis::kData;
    names.back() = annotated ? axis::kOutChannels : "";
    return dim_axes(x, names);
  }
};
Tensor activated(const GroupNormCall& c, Tensor y) { return c.activation.empty() ? y : activation(c.activation, y); }

constexpr KernelRow<GroupNormCall, Tensor> kGroupNorms[] = {
    {kGroupNormKernel,
     [](const GroupNormCall& c) { return kernels_support_shards({c.x}) ? nullptr : kNoPartsForCpuKernels; },
     [](const GroupNormCall& c) {
       const bool silu = c.activation == "silu" || c.activation == "swish";
       Tensor y = groups_by_kernel(c.x, c.w, c.b, c.groups, c.eps, silu, c.axes());
       return silu ? y : activated(c, y);
     }},
    {"composed", never,
     [](const GroupNormCall& c) { return activated(c, normalize_groups(c.x, c.w, c.b, c.groups, c.eps)); }},
};

Tensor f32_param(const Scope& s, const char* name, int64_t width, Init init, const std::string& axis = "") {
  return cast(s.param(name, {width}, {axis}, init), DType::f32);
}

}  // namespace

Tensor group_norm(const Scope& s, Tensor x, int64_t groups, double eps, const std::string& act, bool annotated) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  check(groups > 0 && width % groups == 0, Code::invalid_config,
        "group_norm: {} channels do not divide into {} groups, at {}", width, groups, s.path());
  Tensor w = f32_param(s, "weight", width, init::ones()), b = f32_param(s, "bias", width, init::zeros());
  const GroupNormCall call{x, w, b, groups, eps, act, annotated};
  return kernel_for(kGroupNorms, call).build(call);
}

Tensor layer_norm(const Scope& s, Tensor x, double eps, bool affine) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  auto param = [&](const char* name, Init init, double neutral) {
    return affine ? f32_param(s, name, width, init) : full(x.graph(), neutral, {DType::f32, {width}});
  };
  Tensor w = param("weight", init::ones(), 1), b = param("bias", init::zeros(), 0);
  const LayerNormCall call{x, w, b, eps};
  return kernel_for(kLayerNorms, call).build(call);
}

Tensor unit_norm(const Scope& s, Tensor x, int64_t ones, const std::string& act) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  Dims dims(static_cast<size_t>(1 + ones), 1);
  dims[0] = width;
  Tensor gamma = reshape(cast(s.param("gamma", dims, LogicalAxes(dims.size()), init::ones()), DType::f32), {width});
  Tensor v = f32(x), r = rsqrt(maximum(sum(square(v), {-1}, true), scalar_like(v, kSmallestNorm * kSmallestNorm)));
  Tensor y = cast(v * r * (gamma * std::sqrt(static_cast<double>(width))), x.dtype());
  return act.empty() ? y : activation(act, y);
}

Tensor rms_norm(const Scope& s, Tensor x, double eps, const std::string& axis) {
  auto path = s.path_scope();
  Tensor v = cast(x, DType::f32);
  Tensor y = v * rsqrt(mean(square(v), {-1}, true) + eps) * f32_param(s, "weight", x.dim(-1), init::ones(), axis);
  return cast(y, x.dtype());
}

}  // namespace md::nn
