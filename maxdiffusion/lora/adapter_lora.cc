// y = f(x, W) + alpha/r · B·f(x, A). The product is added to the layer's result, so neither B·A nor the gradient of W
// is computed, and small updates of B are not lost next to W when activations are bf16. Sources: Hu et al. 2021; PEFT
// 0.21. DoRA, y = m/‖W + alpha/r · B·A‖ · that, with the length taken as a constant: Liu et al. 2024, section 4.3.
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/lora/lora_file.h"
#include "maxdiffusion/nn/quantization.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char* kDown = "lora_A.weight";
constexpr const char* kUp = "lora_B.weight";

LoraPair pair_of(const AdapterWeights& w) {
  const auto part = [&](const char* name) {
    const auto found = w.parts.find(name);
    return found == w.parts.end() ? HostArray() : found->second;
  };
  return {part(kDown), part(kUp), w.alpha, w.alpha_in_file};
}

class Lora : public Adapter {
 public:
  std::string_view name() const override { return "lora"; }
  std::string_view peft_type() const override { return "LORA"; }

  std::vector<AdapterPart> parts(const AdapterLayer& l) const override {
    Dims down = l.dims, up(l.dims.size(), 1);
    LogicalAxes down_axes = l.axes, up_axes(l.dims.size());
    down[0] = up[1] = l.rank;
    up[0] = l.dims[0];
    down_axes[0] = "";
    up_axes[0] = l.axes[0];
    const double fan_in = static_cast<double>(Shape{DType::f32, down}.elements()) / static_cast<double>(l.rank);
    return {{kDown, down, down_axes, init::uniform(1 / std::sqrt(fan_in))}, {kUp, up, up_axes, init::zeros()}};
  }

  Tensor forward(const AdapterCall& c) const override {
    const Tensor y = c.before.product(c.weight, c.x, c.f);
    return c.drop_module(y + low_rank(c, c.parts()), y);
  }

  int64_t rank(const PartDims& parts) const override { return parts.at(kDown).at(0); }

  void check_fits(const AdapterWeights& w, const Dims& dims, const std::string& name) const override {
    md::check_fits(pair_of(w), dims, name);
  }

  void add_change(const AdapterWeights& w, const WeightRows& rows, std::span<float> sum) const override {
    const HostArray &down = w.parts.at(kDown), &up = w.parts.at(kUp);
    const int64_t r = down.dims()[0];
    std::vector<float> product(sum.size());
    matrix_product(float_rows(up, r, rows.first, rows.count), float_rows(down, rows.width, 0, r), rows.count, r,
                   rows.width, product);
    const auto scale = static_cast<float>(w.scale());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += scale * product[i];
  }

  std::vector<PartName> names() const override { return {{kDown, "lora_down.weight"}, {kUp, "lora_up.weight"}}; }

 protected:
  /// alpha/r · B·f(x, A), in the dtype of x.
  static Tensor low_rank(const AdapterCall& c, const std::map<std::string, Tensor>& parts) {
    const Tensor a = parts.at(kDown), b = parts.at(kUp), x = c.drop_input(c.x);
    const Tensor h = c.drop_rank(c.f(x, cast(a, x.dtype())) * c.scale);
    return dot(h, cast(reshape(b, {c.weight.dims[0], a.dim(0)}), x.dtype()),
               {.lhs_contract = {h.rank() - 1}, .rhs_contract = {1}, .precision = c.before.options().precision});
  }
};

class Dora : public Lora {
 public:
  std::string_view name() const override { return "dora"; }
  std::string_view lycoris_algorithm() const override { return "lora"; }

  std::vector<AdapterPart> parts(const AdapterLayer& l) const override {
    std::vector<AdapterPart> all = Lora::parts(l);
    all.push_back({kMagnitude, {l.dims[0]}, {l.axes[0]}, init::ones()});  // see initial_magnitudes
    return all;
  }

  Tensor forward(const AdapterCall& c) const override {
    const auto [y, w] = result_and_weight(c);
    const std::map<std::string, Tensor> parts = c.parts();
    const int64_t out = c.weight.dims[0], r = parts.at(kDown).dim(0);
    const Tensor a = reshape(parts.at(kDown), {r, -1}), b = reshape(parts.at(kUp), {out, r});
    const Tensor v = cast(w, DType::f32) + dot(b, a, {.lhs_contract = {1}, .rhs_contract = {0}}) * c.scale;
    const Tensor factor = parts.at(kMagnitude) / stop_gradient(sqrt(sum(square(v), {1})));
    const Tensor all = cast(y + low_rank(c, parts), DType::f32);
    return c.drop_module(cast(all * broadcast_in_dim(factor, all.dims(), {all.rank() - 1}), y.dtype()), y);
  }

  std::vector<PartName> names() const override {
    std::vector<PartName> all = Lora::names();
    all.push_back({kMagnitude, "dora_scale"});
    return all;
  }

  HostArrays for_peft(const AdapterWeights& w) const override {
    HostArrays out = w.parts;
    HostArray& m = out.at(kMagnitude);
    const size_t rank = w.parts.at(kDown).dims().size();
    Dims dims(rank == 2 ? 1 : rank, 1);
    dims[rank == 2 ? 0 : 1] = m.shape().elements();
    m = m.reshaped(dims);
    return out;
  }

 private:
  struct ResultAndWeight {
    Tensor y, w;  // w: [out, the rest]
  };
  /// Of one product, since a layer's weight is made once.
  static ResultAndWeight result_and_weight(const AdapterCall& c) {
    const ScopeOptions& o = c.before.options();
    check(!o.quantization || !o.quantization->covers(c.before.path()), Code::invalid_config,
          "adapter is dora and use_qwix_quantization covers {}; expected a kind that needs no lengths of the weight's "
          "rows",
          c.before.path());
    const int64_t out = c.weight.dims[0];
    if (!o.few_bits || !o.few_bits->covers(c.before.path(), c.weight.dims)) {
      Tensor weight;
      const Tensor y = c.before.product(c.weight, c.x, [&](Tensor x, Tensor w) {
        weight = w;
        return c.f(x, w);
      });
      return {y, reshape(weight, {out, -1})};
    }
    // The weight of few bits is whole only where it is used: it comes out as more rows of the result.
    const Product both = [f = c.f, out](Tensor x, Tensor w) {
      return concatenate({reshape(f(x, w), {-1, out}), transpose(reshape(w, {out, -1}), {1, 0})}, 0);
    };
    const Tensor all = c.before.product(c.weight, c.x, both);
    Dims dims = c.x.dims();
    dims.back() = out;
    const int64_t rows = Shape{DType::f32, dims}.elements() / out;
    return {reshape(slice_axis(all, 0, 0, rows), dims), transpose(slice_axis(all, 0, rows, all.dim(0)), {1, 0})};
  }
};

}  // namespace

const Adapter& lora_adapter() {
  static const Lora kind;
  return kind;
}

const Adapter& dora_adapter() {
  static const Dora kind;
  return kind;
}

}  // namespace md
