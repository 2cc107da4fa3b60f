// W' = l ∘ W: each feature of the result, or of the input, is scaled. The bias is not (LyCORIS); PEFT scales it, too.
// Sources: Liu et al. 2022 (IA³); PEFT 0.21, LyCORIS 3.4.
#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char* kIa3 = "ia3_l";

bool scales_input(const HostArray& l) { return l.dims().size() > 1 && l.dims()[0] == 1 && l.dims()[1] != 1; }

class Ia3 : public Adapter {
 public:
  std::string_view name() const override { return "ia3"; }
  std::string_view peft_type() const override { return "IA3"; }
  bool has_rank() const override { return false; }
  bool drops_input() const override { return false; }
  bool drops_rank() const override { return false; }

  std::vector<AdapterPart> parts(const AdapterLayer& l) const override {
    Dims dims(l.dims.size(), 1);
    LogicalAxes axes(l.dims.size());
    const size_t of = l.on_input ? 1 : 0;
    dims[of] = l.dims[of];
    axes[of] = l.axes[of];
    return {{kIa3, dims, axes, init::ones()}};
  }

  Tensor forward(const AdapterCall& c) const override {
    const auto scaled = [](Tensor x, Tensor l) {
      return x * broadcast_in_dim(cast(reshape(l, {-1}), x.dtype()), x.dims(), {x.rank() - 1});
    };
    const Tensor l = c.parts().at(kIa3);
    if (l.dim(0) == 1) return c.before.product(c.weight, scaled(c.x, c.drop_module(l, full_like(l, 1))), c.f);
    const Tensor y = c.before.product(c.weight, c.x, c.f);
    return c.drop_module(scaled(y, l), y);
  }

  int64_t rank(const PartDims&) const override { return 0; }

  void check_fits(const AdapterWeights& w, const Dims& dims, const std::string& name) const override {
    const auto l = w.parts.find(kIa3);
    check(l != w.parts.end() && !dims.empty(), Code::io, "IA³ for {}: expected {} for a weight of {}", name, kIa3,
          to_string(dims));
    Dims out(dims.size(), 1), in(dims.size(), 1);
    out[0] = dims[0];
    if (dims.size() > 1) in[1] = dims[1];
    check(l->second.dims() == out || l->second.dims() == in, Code::io,
          "IA³ for {}: {} is {}; expected {} or {} for a weight of {}", name, kIa3, to_string(l->second.dims()),
          to_string(out), to_string(in), to_string(dims));
  }

  void add_change(const AdapterWeights& w, const WeightRows& rows, std::span<float> sum) const override {
    const HostArray& l = w.parts.at(kIa3);
    const int64_t count = l.shape().elements();
    const std::vector<float> factors = float_rows(l, count, 0, 1);
    for (int64_t i = 0; i < rows.count; ++i)
      for (int64_t j = 0; j < rows.width; ++j) {
        const int64_t which = scales_input(l) ? j * count / rows.width : (count == 1 ? 0 : rows.first + i);
        const auto at = static_cast<size_t>(i * rows.width + j);
        sum[at] += rows.values[at] * (factors[static_cast<size_t>(which)] - 1);
      }
  }

  std::vector<PartName> names() const override { return {{kIa3, "weight"}}; }

  HostArrays for_peft(const AdapterWeights& w) const override {
    const HostArray& l = w.parts.at(kIa3);
    if (l.dims().size() == 2) return w.parts;
    Dims dims(l.dims().size(), 1);
    dims[1] = l.shape().elements();
    return {{kIa3, l.reshaped(dims)}};
  }

  /// The difference from 1, of sizes [n] or [1, n, 1, …], and what is scaled.
  HostArrays for_lycoris(const AdapterWeights& w) const override {
    const HostArray l = w.parts.at(kIa3).cast(DType::f32);
    Dims dims(l.dims().size() == 2 ? 1 : l.dims().size(), 1);
    dims[dims.size() == 1 ? 0 : 1] = l.shape().elements();
    HostArray difference(Shape{DType::f32, dims});
    std::ranges::transform(l.view<float>(), difference.mutable_view<float>().begin(), [](float v) { return v - 1; });
    HostArray on_input(Shape{DType::s64, {}});
    on_input.mutable_view<int64_t>()[0] = scales_input(l) ? 1 : 0;
    return {{"weight", difference}, {"on_input", on_input}};
  }
};

}  // namespace

const Adapter& ia3_adapter() {
  static const Ia3 kind;
  return kind;
}

}  // namespace md
