// ΔW = alpha/r · (A1·B1) ∘ (A2·B2), the product of elements of two products of matrices. Source: Hyeon-Woo et al. 2022
// (FedPara); LyCORIS 3.4 (initial values).
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char* kHada[] = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"};

class Loha : public AddedWeight {
 public:
  std::string_view name() const override { return "loha"; }
  std::string_view peft_type() const override { return "LOHA"; }

  std::vector<AdapterPart> parts(const AdapterLayer& l) const override {
    const int64_t out = l.dims[0], rest = Shape{DType::f32, l.dims}.elements() / out;
    const Dims a = {out, l.rank}, b = {l.rank, rest};
    const LogicalAxes of_a = {l.axes[0], ""}, of_b = {"", l.dims.size() == 2 ? l.axes[1] : ""};
    return {{kHada[0], a, of_a, init::normal(0.1)},
            {kHada[1], b, of_b, init::normal(1)},
            {kHada[2], a, of_a, init::zeros()},
            {kHada[3], b, of_b, init::normal(1)}};
  }

  int64_t rank(const PartDims& parts) const override { return parts.at(kHada[1]).at(0); }

  void check_fits(const AdapterWeights& w, const Dims& dims, const std::string& name) const override {
    check(dims.size() >= 2, Code::io, "LoHa for {}: the weight is {}; only matrices and convolutions take one", name,
          to_string(dims));
    const int64_t rest = Shape{DType::f32, dims}.elements() / dims[0];
    for (size_t i : {0, 2}) {
      const auto a = w.parts.find(kHada[i]), b = w.parts.find(kHada[i + 1]);
      check(a != w.parts.end() && b != w.parts.end(), Code::io, "LoHa for {}: {} or {} is missing", name, kHada[i],
            kHada[i + 1]);
      const Dims &left = a->second.dims(), &right = b->second.dims();
      check(left.size() == 2 && right.size() == 2 && left[0] == dims[0] && left[1] == right[0] && right[1] == rest &&
                right[0] > 0,
            Code::io, "LoHa for {}: {} is {} and {} is {}; expected [{}, r] and [r, {}] for a weight of {}", name,
            kHada[i], to_string(left), kHada[i + 1], to_string(right), dims[0], rest, to_string(dims));
    }
  }

  void add_change(const AdapterWeights& w, const WeightRows& rows, std::span<float> sum) const override {
    std::vector<float> product[2];
    for (size_t i : {0, 1}) {
      const HostArray &a = w.parts.at(kHada[2 * i]), &b = w.parts.at(kHada[2 * i + 1]);
      const int64_t r = b.dims()[0];
      product[i].resize(sum.size());
      matrix_product(float_rows(a, r, rows.first, rows.count), float_rows(b, rows.width, 0, r), rows.count, r,
                     rows.width, product[i]);
    }
    const auto scale = static_cast<float>(w.scale());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += scale * product[0][i] * product[1][i];
  }

  std::vector<PartName> names() const override {
    std::vector<PartName> all;
    for (const char* part : kHada) all.push_back({part, part});
    return all;
  }

 protected:
  Tensor change(const std::map<std::string, Tensor>& parts, const Dims& dims) const override {
    const auto product = [&](size_t i) { return matmul(parts.at(kHada[i]), parts.at(kHada[i + 1])); };
    return reshape(product(0) * product(2), dims);
  }
};

}  // namespace

const Adapter& loha_adapter() {
  static const Loha kind;
  return kind;
}

}  // namespace md
