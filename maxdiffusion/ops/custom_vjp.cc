#include "maxdiffusion/ops/custom_vjp.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

struct CustomVjp {
  size_t xs;
  std::function<Grads(const std::vector<Tensor>&, const std::vector<Tensor>&, const Grads&)> backward;
};

// The identity on the ys of (xs…, ys…). Cotangents of the outputs are passed to the user's function, whose results are
// the cotangents of xs; so no cotangent enters the forward function.
const OpDef kCustomVjp = {
    .name = "custom_vjp",
    .infer =
        [](const InferCtx& c) {
          return std::vector<Shape>(c.in.begin() + static_cast<int64_t>(c.attrs<CustomVjp>().xs), c.in.end());
        },
    .emit =
        [](EmitCtx& c) {
          const int xs = static_cast<int>(c.attrs<CustomVjp>().xs);
          for (int i = xs; i < c.in_count(); ++i) c.set_out(c.in(i), i - xs);
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& a = c.attrs<CustomVjp>();
      std::vector<Tensor> xs, ys;
      Grads dys;
      for (size_t i = 0; i < c.in_count(); ++i) (i < a.xs ? xs : ys).push_back(c.in(static_cast<int>(i)));
      for (size_t i = 0; i < ys.size(); ++i) dys.push_back(c.dy(static_cast<int>(i)));
      Grads dxs = a.backward(xs, ys, dys);
      check(dxs.size() == a.xs, Code::invalid_graph, "custom_vjp: backward returned {} cotangents for {} values",
            dxs.size(), a.xs);
      dxs.resize(c.in_count());
      return dxs;
    },
    .same_as = [](const Node& n, int i) { return n.attrs<CustomVjp>().xs + static_cast<size_t>(i); },
};

}  // namespace

std::vector<Tensor> custom_vjp(const std::vector<Tensor>& xs, const GraphFn& forward,
                               const std::function<Grads(const std::vector<Tensor>& xs, const std::vector<Tensor>& ys,
                                                         const Grads& dys)>& backward) {
  std::vector<Tensor> all = xs;
  for (Tensor y : forward(xs)) all.push_back(y);
  return apply_multi(kCustomVjp, all, CustomVjp{xs.size(), backward});
}

OpList custom_vjp_ops() { return {&kCustomVjp}; }

}  // namespace md
