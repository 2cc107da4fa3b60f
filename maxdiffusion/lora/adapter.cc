#include "maxdiffusion/lora/adapter.h"

#include <dnnl.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/half.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {

#define ADAPTERS(X) X(lora) X(dora) X(loha) X(lokr) X(ia3) X(full)

#define DECLARE(name) const Adapter& name##_adapter();
ADAPTERS(DECLARE)
#undef DECLARE

const std::vector<const Adapter*>& adapters() {
#define ROW(name) &name##_adapter(),
  static const std::vector<const Adapter*> all = {ADAPTERS(ROW)};
#undef ROW
  return all;
}

std::vector<std::string> adapter_names() {
  std::vector<std::string> names;
  for (const Adapter* a : adapters()) names.emplace_back(a->name());
  return names;
}

const Adapter& adapter_named(const std::string& name) {
  for (const Adapter* a : adapters())
    if (a->name() == name) return *a;
  fail(Code::invalid_config, "adapter is '{}'; expected one of: {}", name, fmt::join(adapter_names(), ", "));
}

AdapterPath adapter_path(const std::string& parameter) {
  static const std::vector<std::string> endings = [] {
    std::vector<std::string> all;
    for (const Adapter* a : adapters())
      for (const Adapter::PartName& part : a->names()) all.push_back("." + std::string(part.name));
    return all;
  }();
  for (const std::string& ending : endings)
    if (parameter.ends_with(ending)) return {parameter.substr(0, parameter.size() - ending.size()), ending.substr(1)};
  return {};
}

PartDims AdapterWeights::dims() const {
  PartDims out;
  for (const auto& [name, array] : parts) out[name] = array.dims();
  return out;
}

double AdapterWeights::scale() const {
  const int64_t rank = kind->rank(dims());
  return rank == 0 ? 1 : alpha / static_cast<double>(rank);
}

HostArrays Adapter::for_peft(const AdapterWeights& weights) const { return weights.parts; }

HostArrays Adapter::for_lycoris(const AdapterWeights& weights) const {
  HostArrays out;
  for (const PartName& part : names())
    if (const auto found = weights.parts.find(part.name); found != weights.parts.end())
      out[part.lycoris] = found->second;
  return out;
}

Tensor AddedWeight::forward(const AdapterCall& c) const {
  const Tensor y = c.before.product(c.weight, c.x, c.f);
  const Tensor d = c.drop_rows(change(c.parts(), c.weight.dims) * c.scale);
  return c.drop_module(y + c.f(c.drop_input(c.x), cast(d, c.x.dtype())), y);
}

std::vector<float> float_rows(const HostArray& a, int64_t width, int64_t first, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count * width));
  const size_t begin = static_cast<size_t>(first * width) * size_of(a.dtype());
  convert_elements(a.dtype(), a.data() + begin, DType::f32, out.data(), out.size());
  return out;
}

void matrix_product(std::span<const float> a, std::span<const float> b, int64_t rows, int64_t inner, int64_t columns,
                    std::span<float> out) {
  const auto status =
      dnnl_sgemm('N', 'N', rows, columns, inner, 1.0f, a.data(), inner, b.data(), columns, 0.0f, out.data(), columns);
  check(status == dnnl_success, Code::internal, "adapter: oneDNN's product gives status {}", static_cast<int>(status));
}

void add_adapter_rows(const AdapterWeights& a, double factor, const WeightRows& rows,
                      std::span<const float> column_norms, std::span<float> sum) {
  std::vector<float> change(sum.size());
  a.kind->add_change(a, rows, change);
  const auto width = static_cast<size_t>(rows.width);
  if (const auto found = a.parts.find(kMagnitude); found != a.parts.end()) {
    const bool of_columns = !column_norms.empty();
    const std::vector<float> magnitude = of_columns ? float_rows(found->second, found->second.shape().elements(), 0, 1)
                                                    : float_rows(found->second, 1, rows.first, rows.count);
    for (size_t i = 0; i < static_cast<size_t>(rows.count); ++i) {
      const auto row = std::span(change).subspan(i * width, width);
      const auto before = rows.values.subspan(i * width, width);
      double squares = 0;
      for (size_t j = 0; j < width; ++j) {
        row[j] += before[j];
        squares += static_cast<double>(row[j]) * row[j];
      }
      const double norm = std::sqrt(squares);
      for (size_t j = 0; j < width; ++j) {
        const size_t column = j * magnitude.size() / width;  // of an input feature and its window
        const double m = of_columns ? magnitude[column] : magnitude[i], n = of_columns ? column_norms[column] : norm;
        row[j] = static_cast<float>(n > 0 ? m * row[j] / n : 0) - before[j];
      }
    }
  }
  const auto f = static_cast<float>(factor);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += f * change[i];
}

HostArray change_of(const AdapterWeights& weights, const Dims& dims) {
  HostArray out(Shape{DType::f32, dims});
  std::ranges::fill(out.mutable_view<float>(), 0.0f);
  const int64_t width = out.shape().elements() / dims.at(0);
  const std::vector<float> none(static_cast<size_t>(out.shape().elements()));
  weights.kind->add_change(weights, {0, dims[0], width, none}, out.mutable_view<float>());
  return out;
}

}  // namespace md
