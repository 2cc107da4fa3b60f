#include "maxdiffusion/lora/lora_merge.h"

#include <dnnl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/half.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/kernels/onednn.h"

namespace md {
namespace {

constexpr int64_t kElements = int64_t{1} << 18;  // elements of a weight at a time

/// Of each addend what add_adapter_rows needs of the whole weight.
using ColumnNorms = std::vector<std::vector<float>>;

/// Lengths of the columns of a weight with what an adapter adds before DoRA's magnitudes: of an input feature, or of it
/// and its window.
std::vector<float> lengths_of_columns(const AdapterWeights& w, const Dims& dims, DType type, const std::byte* from) {
  const int64_t rows = dims[0], width = Shape{type, dims}.elements() / rows, columns = dims[1];
  std::vector<double> squares(static_cast<size_t>(columns));
  const int64_t step = std::max<int64_t>(kElements / width, 1);
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    std::vector<float> before(static_cast<size_t>(count * width));
    convert_elements(type, from + static_cast<size_t>(row * width) * size_of(type), DType::f32, before.data(),
                     before.size());
    std::vector<float> after = before;
    w.kind->add_change(w, {row, count, width, before}, after);
    for (size_t i = 0; i < after.size(); ++i)
      squares[i % static_cast<size_t>(width) * static_cast<size_t>(columns) / static_cast<size_t>(width)] +=
          static_cast<double>(after[i]) * after[i];
  }
  std::vector<float> out;
  for (double s : squares) out.push_back(static_cast<float>(std::sqrt(s)));
  return out;
}

}  // namespace

struct LoraSums::Rows {
  const Addends* addends;
  DType type;
  int64_t row, rows, width;
  const std::byte* from;  // the first of these rows
  std::byte* to;
  std::shared_ptr<const ColumnNorms> norms;

  void add() const {
    std::vector<float> w(static_cast<size_t>(rows * width));
    convert_elements(type, from, DType::f32, w.data(), w.size());
    const bool has_adapters = std::ranges::any_of(*addends, [](const Addend& a) { return a.adapter; });
    const std::vector<float> before = has_adapters ? w : std::vector<float>();
    for (size_t i = 0; i < addends->size(); ++i) {
      const Addend& a = (*addends)[i];
      if (a.adapter) {
        add_adapter_rows(*a.adapter, a.factor, {row, rows, width, before}, (*norms)[i], w);
        continue;
      }
      const auto factor = static_cast<float>(a.factor);
      if (!a.pair) {
        std::ranges::transform(float_rows(*a.whole, width, row, rows), w, w.begin(),
                               [&](float d, float v) { return v + factor * d; });
        continue;
      }
      // As matrices [rows, r] × [r, width].
      const int64_t r = a.pair->rank();
      const std::vector<float> up = float_rows(a.pair->up, r, row, rows), down = float_rows(a.pair->down, width, 0, r);
      const auto status =
          dnnl_sgemm('N', 'N', rows, width, r, factor, up.data(), r, down.data(), width, 1.0f, w.data(), width);
      check(status == dnnl_success, Code::internal, "merge LoRA: oneDNN's product gives status {}",
            static_cast<int>(status));
    }
    convert_elements(DType::f32, w.data(), type, to, w.size());
  }
};

double ScaledLora::scale_of(const std::string& component, const std::string& path) const {
  const auto its = scales.find(component);
  if (its == scales.end()) return scale;
  const auto found = its->second.find(path);
  return found == its->second.end() ? scale : found->second;
}

LoraSums::LoraSums(const std::vector<ScaledLora>& loras, const ParamTable& params, const LeftOut& left_out) {
  std::map<std::string, std::map<std::string, Dims>> weights;  // component → published path
  for (const Param& p : params.params())
    for (int64_t i = 0; i < std::max<int64_t>(p.stacked, 1); ++i)
      weights[p.model][p.stacked > 0 ? layer_path(p.path, i) : p.path] = {
          p.shape.dims.begin() + (p.stacked > 0 ? 1 : 0), p.shape.dims.end()};
  /// Plans the addition of `one` to a weight after `fits` has checked its dims.
  const auto plan = [&](const std::string& file, const std::string& component, const std::string& path, Addend one,
                        const std::function<void(const Dims& dims, const std::string& name)>& fits) {
    const auto model = weights.find(component);
    if (model == weights.end()) return;
    const auto weight = model->second.find(path);
    if (weight == model->second.end()) return;
    fits(weight->second, fmt::format("{} of {} in '{}'", path, component, file));
    if (one.factor != 0) addends_[component][path].push_back(one);
  };
  for (size_t i = 0; i < loras.size(); ++i) {
    if (!left_out.empty() && left_out[i]) continue;
    const ScaledLora& lora = loras[i];
    for (const auto& [component, pairs] : lora.file.pairs)
      for (const auto& [path, pair] : pairs)
        plan(lora.file.name, component, path,
             {&pair, nullptr, nullptr, lora.scale_of(component, path) * pair.alpha / static_cast<double>(pair.rank())},
             [&p = pair](const Dims& dims, const std::string& name) { check_fits(p, dims, name); });
    for (const auto& [component, arrays] : lora.file.differences)
      for (const auto& [path, array] : arrays)
        plan(lora.file.name, component, path, {nullptr, &array, nullptr, lora.scale_of(component, path)},
             [&a = array](const Dims& dims, const std::string& name) {
               check(a.dims() == dims, Code::io, "LoRA for {}: the difference is {}, the parameter {}", name,
                     to_string(a.dims()), to_string(dims));
             });
    for (const auto& [component, weights] : lora.file.adapters)
      for (const auto& [path, w] : weights)
        plan(lora.file.name, component, path, {nullptr, nullptr, &w, lora.scale_of(component, path)},
             [&a = w](const Dims& dims, const std::string& name) { a.kind->check_fits(a, dims, name); });
  }
}

void LoraSums::cut(const Addends& addends, const Dims& dims, DType type, const std::byte* from, std::byte* to,
                   std::vector<Rows>& out) {
  const int64_t rows = dims.empty() ? 1 : dims[0];
  if (rows == 0) return;
  auto norms = std::make_shared<ColumnNorms>(addends.size());
  for (size_t i = 0; i < addends.size(); ++i)
    if (const AdapterWeights* a = addends[i].adapter; a && a->parts.contains(kMagnitude))
      if (const Dims& m = a->parts.at(kMagnitude).dims(); m.size() > 1 && m[0] == 1 && m[1] != 1)
        (*norms)[i] = lengths_of_columns(*a, dims, type, from);
  const int64_t width = Shape{type, dims}.elements() / rows,
                step = std::max<int64_t>(kElements / std::max<int64_t>(width, 1), 1);
  for (int64_t row = 0; row < rows; row += step) {
    const size_t begin = static_cast<size_t>(row * width) * size_of(type);
    out.push_back({&addends, type, row, std::min(step, rows - row), width, from + begin, to + begin, norms});
  }
}

void LoraSums::add(const std::vector<Rows>& all) {
  std::async(std::launch::async,
             [&] {  // on a separate thread, so that the OpenMP setting ends with it
               parallel_for(std::ssize(all), [&](int64_t i, int) {
                 use_one_thread();
                 all[static_cast<size_t>(i)].add();
               });
             })
      .get();
}

HostArray LoraSums::added(const std::string& component, const std::string& path, const HostArray& value) const {
  const auto model = addends_.find(component);
  if (model == addends_.end()) return value;
  const auto addends = model->second.find(path);
  if (addends == model->second.end()) return value;
  HostArray sum(value.shape());
  std::vector<Rows> rows;
  cut(addends->second, value.dims(), value.dtype(), value.data(), sum.mutable_data(), rows);
  add(rows);
  return sum;
}

void merge_loras(const std::vector<ScaledLora>& loras, const ParamTable& params, HostArrays& values,
                 const LeftOut& left_out) {
  const LoraSums sums(loras, params, left_out);
  for (const Param& p : params.params()) {
    const auto model = sums.addends_.find(p.model);
    if (model == sums.addends_.end()) continue;
    const auto value = values.find(p.input);
    const Dims dims(p.shape.dims.begin() + (p.stacked > 0 ? 1 : 0), p.shape.dims.end());
    HostArray sum;
    std::vector<LoraSums::Rows> rows;
    for (int64_t i = 0; i < std::max<int64_t>(p.stacked, 1); ++i) {
      const auto addends = model->second.find(p.stacked > 0 ? layer_path(p.path, i) : p.path);
      if (addends == model->second.end()) continue;
      check(value != values.end(), Code::internal, "LoRA for {}: there is no value of '{}'", p.path, p.input);
      const HostArray& before = value->second;
      if (!sum) {
        sum = HostArray(before.shape());
        std::memcpy(sum.mutable_data(), before.data(), sum.bytes());
      }
      const auto layer = static_cast<size_t>(i * Shape{sum.dtype(), dims}.bytes());
      LoraSums::cut(addends->second, dims, sum.dtype(), before.data() + layer, sum.mutable_data() + layer, rows);
    }
    if (!sum) continue;
    LoraSums::add(rows);
    value->second = std::move(sum);
  }
}

}  // namespace md
