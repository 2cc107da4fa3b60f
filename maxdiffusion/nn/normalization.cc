// Normalisations. Statistics in f32, two passes (mean, then the centred square), because one pass over x and x² loses
// the variance of a signal with a large mean. The gradient is written out: it keeps x and the statistics only, and is
// a third of the operations that differentiating the forward text would give.
#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md::nn {
namespace {

/// How x is seen while it is normalised: `dims` with statistics over `over`; weight and bias have the trailing
/// dims `weight`.
struct View {
  Dims dims;
  Axes over;
  Dims weight;
};

/// (x − mean) / sqrt(var + eps) · w + b.   w, b: f32 [C].
Tensor normalize(Tensor x, Tensor w, Tensor b, const View& view, double eps) {
  auto seen = [view](Tensor t) { return reshape(cast(t, DType::f32), view.dims); };
  auto forward = [=](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    Tensor v = seen(in[0]);
    Tensor m = mean(v, view.over, true);
    Tensor c = v - m;
    Tensor r = rsqrt(mean(square(c), view.over, true) + eps);
    Tensor y = c * r * reshape(in[1], view.weight) + reshape(in[2], view.weight);
    return {cast(reshape(y, in[0].dims()), in[0].dtype()), m, r};
  };
  auto backward = [=](const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
    Tensor r = out[2], dy = seen(dys[0]);
    Tensor n = (seen(in[0]) - out[1]) * r;
    Tensor g = dy * reshape(in[1], view.weight), gn = g * n;
    Tensor dx = r * (g - mean(g, view.over, true) - n * mean(gn, view.over, true));
    Axes rest;  // all but the trailing dims of the weight
    for (size_t i = 0; i + view.weight.size() < view.dims.size(); ++i) rest.push_back(static_cast<int64_t>(i));
    return {cast(reshape(dx, in[0].dims()), in[0].dtype()), reshape(sum(dy * n, rest), in[1].dims()),
            reshape(sum(dy, rest), in[2].dims())};
  };
  return custom_vjp({x, w, b}, forward, backward)[0];
}

Tensor f32_param(const Scope& s, const char* name, int64_t width, Init init) {
  return cast(s.param(name, {width}, {""}, init), DType::f32);
}

}  // namespace

Tensor group_norm(const Scope& s, Tensor x, int64_t groups, double eps) {
  auto path = s.here();
  const int64_t width = x.dim(-1), batch = x.dim(0);
  check(groups > 0 && width % groups == 0, Code::invalid_config,
        "group_norm: {} channels do not divide into {} groups, at {}", width, groups, s.path());
  const View view{.dims = {batch, x.shape().elements() / (batch * width), groups, width / groups},
                  .over = {1, 3},
                  .weight = {groups, width / groups}};
  return normalize(x, f32_param(s, "weight", width, init::ones()), f32_param(s, "bias", width, init::zeros()), view,
                   eps);
}

Tensor layer_norm(const Scope& s, Tensor x, double eps, bool affine) {
  auto path = s.here();
  const int64_t width = x.dim(-1);
  if (!affine) {
    Tensor v = cast(x, DType::f32);
    Tensor c = v - mean(v, {-1}, true);
    return cast(c * rsqrt(mean(square(c), {-1}, true) + eps), x.dtype());
  }
  const View view{.dims = x.dims(), .over = {x.rank() - 1}, .weight = {width}};
  return normalize(x, f32_param(s, "weight", width, init::ones()), f32_param(s, "bias", width, init::zeros()), view,
                   eps);
}

Tensor rms_norm(const Scope& s, Tensor x, double eps) {
  auto path = s.here();
  Tensor v = cast(x, DType::f32);
  Tensor y = v * rsqrt(mean(square(v), {-1}, true) + eps) * f32_param(s, "weight", x.dim(-1), init::ones());
  return cast(y, x.dtype());
}

}  // namespace md::nn
