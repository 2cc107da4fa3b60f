// ΔW = alpha/r · W1 ⊗ W2, a Kronecker product whose factors may be products of matrices of rank r. Without such a
// factor alpha and r do not count. Source: Yeh et al. 2023 (LyCORIS); LyCORIS 3.4 (sizes, initial values).
#include <algorithm>
#include <cmath>
#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kFirst = "lokr_w1", *kFirstA = "lokr_w1_a", *kFirstB = "lokr_w1_b", *kSecond = "lokr_w2",
                     *kSecondA = "lokr_w2_a", *kSecondB = "lokr_w2_b";

/// n as a product of two numbers: `factor` first where that divides n, else the two nearest to each other, the smaller
/// first and at most `factor` (−1: any). As PEFT, which finds the sizes again by it; LyCORIS puts the smaller first.
std::pair<int64_t, int64_t> two_factors(int64_t n, int64_t factor) {
  if (factor > 0 && n % factor == 0) return {factor, n / factor};
  const int64_t most = factor < 0 ? n : factor;
  int64_t best = 1;
  for (int64_t m = 1; m * m <= n && m <= most; ++m)
    if (n % m == 0) best = m;
  return {best, n / best};
}

/// The sizes of a weight's factors.
struct Factors {
  int64_t out1, out2, in1, in2, window;
  Factors(const Dims& dims, int64_t factor) {
    std::tie(out1, out2) = two_factors(dims[0], factor);
    std::tie(in1, in2) = two_factors(dims[1], factor);
    window = Shape{DType::f32, dims}.elements() / (dims[0] * dims[1]);
  }
};

class Lokr : public AddedWeight {
 public:
  std::string_view name() const override { return "lokr"; }
  std::string_view peft_type() const override { return "LOKR"; }

  std::vector<AdapterPart> parts(const AdapterLayer& l) const override {
    const Factors f(l.dims, l.factor);
    std::vector<AdapterPart> all;
    const auto add = [&](const char* name, Dims dims, bool zero = false) {
      const double fan_in = static_cast<double>(Shape{DType::f32, dims}.elements()) / static_cast<double>(dims[0]);
      LogicalAxes axes(dims.size());
      all.push_back(
          {name, std::move(dims), std::move(axes), zero ? init::zeros() : init::uniform(1 / std::sqrt(fan_in))});
    };
    if (l.decompose_both && 2 * l.rank < std::max(f.out1, f.in1)) {
      add(kFirstA, {f.out1, l.rank});
      add(kFirstB, {l.rank, f.in1});
    } else {
      add(kFirst, {f.out1, f.in1});
    }
    if (2 * l.rank < std::max(f.out2, f.in2)) {
      add(kSecondA, {f.out2, l.rank});
      add(kSecondB, {l.rank, f.in2 * f.window}, true);
    } else {
      Dims dims = l.dims;
      dims[0] = f.out2, dims[1] = f.in2;
      add(kSecond, dims, true);
    }
    return all;
  }

  int64_t rank(const PartDims& parts) const override {
    for (const char* name : {kSecondB, kFirstB})
      if (const auto found = parts.find(name); found != parts.end()) return found->second.at(0);
    return 0;
  }

  void check_fits(const AdapterWeights& w, const Dims& dims, const std::string& name) const override {
    check(dims.size() >= 2, Code::io, "LoKr for {}: the weight is {}; only matrices and convolutions take one", name,
          to_string(dims));
    const auto matrix = [&](const char* whole, const char* a, const char* b) -> Dims {
      const auto found = w.parts.find(whole), left = w.parts.find(a), right = w.parts.find(b);
      if (found != w.parts.end() && found->second.dims().size() >= 2) {
        const Dims& d = found->second.dims();
        return {d[0], Shape{DType::f32, d}.elements() / d[0]};
      }
      check(left != w.parts.end() && right != w.parts.end() && left->second.dims().size() == 2 &&
                right->second.dims().size() == 2 && left->second.dims()[1] == right->second.dims()[0],
            Code::io, "LoKr for {}: expected {}, or {} and {} whose product it is", name, whole, a, b);
      return {left->second.dims()[0], right->second.dims()[1]};
    };
    const Dims first = matrix(kFirst, kFirstA, kFirstB), second = matrix(kSecond, kSecondA, kSecondB);
    check(first[0] * second[0] == dims[0] && first[1] * second[1] == Shape{DType::f32, dims}.elements() / dims[0],
          Code::io, "LoKr for {}: the factors are {} and {}, expected their product to be {}", name, to_string(first),
          to_string(second), to_string(dims));
  }

  void add_change(const AdapterWeights& w, const WeightRows& rows, std::span<float> sum) const override {
    const auto whole = [&](const char* name, const char* a, const char* b, int64_t& out) {
      if (const auto found = w.parts.find(name); found != w.parts.end()) {
        out = found->second.dims()[0];
        return float_rows(found->second, found->second.shape().elements() / out, 0, out);
      }
      const HostArray &left = w.parts.at(a), &right = w.parts.at(b);
      out = left.dims()[0];
      const int64_t r = right.dims()[0], columns = right.dims()[1];
      std::vector<float> product(static_cast<size_t>(out * columns));
      matrix_product(float_rows(left, r, 0, out), float_rows(right, columns, 0, r), out, r, columns, product);
      return product;
    };
    int64_t out1 = 0, out2 = 0;
    const std::vector<float> first = whole(kFirst, kFirstA, kFirstB, out1),
                             second = whole(kSecond, kSecondA, kSecondB, out2);
    const auto in1 = first.size() / static_cast<size_t>(out1), in2 = second.size() / static_cast<size_t>(out2);
    const auto scale = static_cast<float>(w.scale());
    for (int64_t i = 0; i < rows.count; ++i) {
      const auto row1 = static_cast<size_t>((rows.first + i) / out2),
                 row2 = static_cast<size_t>((rows.first + i) % out2);
      float* to = sum.data() + i * rows.width;
      for (size_t u = 0; u < in1; ++u)
        for (size_t v = 0; v < in2; ++v) *to++ += scale * first[row1 * in1 + u] * second[row2 * in2 + v];
    }
  }

  std::vector<PartName> names() const override {
    std::vector<PartName> all;
    for (const char* part : {kFirstA, kFirstB, kSecondA, kSecondB, kFirst, kSecond}) all.push_back({part, part});
    return all;
  }

 protected:
  Tensor change(const std::map<std::string, Tensor>& parts, const Dims& dims) const override {
    const auto matrix = [&](const char* whole, const char* a, const char* b) {
      const auto found = parts.find(whole);
      return found == parts.end() ? matmul(parts.at(a), parts.at(b))
                                  : reshape(found->second, {found->second.dim(0), -1});
    };
    const Tensor first = matrix(kFirst, kFirstA, kFirstB), second = matrix(kSecond, kSecondA, kSecondB);
    const Dims four = {first.dim(0), second.dim(0), first.dim(1), second.dim(1)};
    return reshape(broadcast_in_dim(first, four, {0, 2}) * broadcast_in_dim(second, four, {1, 3}), dims);
  }
};

}  // namespace

const Adapter& lokr_adapter() {
  static const Lokr kind;
  return kind;
}

}  // namespace md
