#include "maxdiffusion/ops/projection.h"

#include <algorithm>

#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/kernel_table.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

struct Call {
  Tensor x, w;
  Precision precision;
  const LogicalAxes &rows, &of_w;
};

Tensor plain(Tensor x, Tensor w, Precision precision) {
  return dot(x, w, {.lhs_contract = {-1}, .rhs_contract = {1}, .precision = precision});
}

const char* parts_refuse(const Call& c) {
  const GraphOptions& o = c.x.graph().options();
  if (o.one_device()) return "there is one device";
  if (!kernels_support_shards({c.x, c.w})) return kNoPartsForCpuKernels;
  const auto size = static_cast<double>(c.x.shape().elements()) * static_cast<double>(c.w.dim(0));
  return product_kernel_pays(o, c.x.dtype(), size / static_cast<double>(o.devices()))
             ? nullptr
             : "the compiler's own code is faster";
}

Tensor by_parts(const Call& c) {
  LogicalAxes names = c.rows;
  names.resize(c.x.dims().size());
  names.back() = "";
  DimAxes x = dim_axes(c.x, names), w = axes_in_use(c.w, c.of_w);
  for (auto& axes : w)  // a mesh axis may shard only one dim of an array
    std::erase_if(axes, [&](const std::string& axis) {
      return std::ranges::any_of(x, [&](const auto& of_dim) { return std::ranges::count(of_dim, axis) > 0; });
    });
  DimAxes y = x;
  x.back() = w[1];
  y.back() = w[0];
  auto one = [](Tensor t) { return std::vector<Tensor>{t}; };
  auto forward = [=, precision = c.precision](const std::vector<Tensor>& in) {
    return per_device(in, {x, w}, {y}, [&](const auto& part) { return one(plain(part[0], part[1], precision)); });
  };
  auto backward = [=, precision = c.precision](const std::vector<Tensor>& in, const std::vector<Tensor>&,
                                               const Grads& dys) -> Grads {
    const Tensor dy = cast(dys[0], in[0].dtype());
    Axes leading;
    for (int64_t i = 0; i + 1 < dy.rank(); ++i) leading.push_back(i);
    return {
        per_device({dy, in[1]}, {y, w}, {x},
                   [&](const auto& part) {
                     return one(
                         dot(part[0], part[1], {.lhs_contract = {-1}, .rhs_contract = {0}, .precision = precision}));
                   })[0],
        per_device({dy, in[0]}, {y, x}, {w}, [&](const auto& part) {
          return one(dot(part[0], part[1], {.lhs_contract = leading, .rhs_contract = leading, .precision = precision}));
        })[0]};
  };
  return named(custom_vjp({c.x, c.w}, forward, backward)[0], kProjection);
}

constexpr KernelRow<Call, Tensor> kProjections[] = {
    {"product by device", parts_refuse, by_parts},
    {"dot", never, [](const Call& c) { return plain(c.x, c.w, c.precision); }},
};

}  // namespace

Tensor project(Tensor x, Tensor w, Precision precision, const LogicalAxes& rows, const LogicalAxes& of_w) {
  const Call call{x, w, precision, rows, of_w};
  return kernel_for(kProjections, call).build(call);
}

}  // namespace md
