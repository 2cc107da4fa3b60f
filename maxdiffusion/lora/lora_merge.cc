#include "maxdiffusion/lora/lora_merge.h"

#include <dnnl.h>

#include <algorithm>
#include <functional>
#include <future>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/kernels/onednn.h"

namespace md {
namespace {

/// One product, or one whole array, to be added at an offset of a parameter.
struct Addend {
  const LoraPair* pair;  // null: `whole` is added
  const HostArray* whole;
  double factor;
  int64_t offset;  // elements: the layer of a stacked parameter
};

struct Work {
  HostArray* value;
  std::vector<Addend> addends;
};

/// w += factor · whole, or factor · up·down as a matrix product [out, r] × [r, the rest].
void add(const Addend& a, std::span<float> w) {
  w = w.subspan(static_cast<size_t>(a.offset));
  if (!a.pair) {
    const HostArray whole = a.whole->cast(DType::f32);
    const auto factor = static_cast<float>(a.factor);
    std::ranges::transform(whole.view<float>(), w, w.begin(), [&](float d, float v) { return v + factor * d; });
    return;
  }
  const HostArray up = a.pair->up.cast(DType::f32), down = a.pair->down.cast(DType::f32);
  const int64_t out = up.dims()[0], r = up.dims()[1], rest = down.shape().elements() / r;
  const auto status = dnnl_sgemm('N', 'N', out, rest, r, static_cast<float>(a.factor), up.view<float>().data(), r,
                                 down.view<float>().data(), rest, 1.0f, w.data(), rest);
  check(status == dnnl_success, Code::internal, "merge LoRA: oneDNN's product gives status {}",
        static_cast<int>(status));
}

void work_on(const Work& w) {
  HostArray sum(Shape{DType::f32, w.value->dims()});
  const HostArray before = w.value->cast(DType::f32);
  std::ranges::copy(before.view<float>(), sum.mutable_view<float>().begin());
  for (const Addend& a : w.addends) add(a, sum.mutable_view<float>());
  *w.value = sum.cast(w.value->dtype());
}

}  // namespace

void merge_loras(const std::vector<ScaledLora>& loras, const ParamTable& params, HostArrays& values) {
  struct Place {
    const Param* param;
    int64_t layer;
  };
  std::map<std::string, std::map<std::string, Place>> places;  // component → published path
  for (const Param& p : params.params())
    for (int64_t i = 0; i < std::max<int64_t>(p.stacked, 1); ++i)
      places[p.model][p.stacked > 0 ? layer_path(p.path, i) : p.path] = {&p, i};

  std::map<std::string, Work> work;
  /// Lets `one` be added to a parameter, once `fits` has accepted its dims.
  auto plan = [&](const std::string& file, const std::string& component, const std::string& path, Addend one,
                  const std::function<void(const Dims& dims, const std::string& name)>& fits) {
    const auto model = places.find(component);
    if (model == places.end()) return;
    const std::string name = fmt::format("{} of {} in '{}'", path, component, file);
    const auto place = model->second.find(path);
    check(place != model->second.end(), Code::io, "LoRA for {}: the model has no such weight", name);
    const Param& p = *place->second.param;
    const auto value = values.find(p.input);
    check(value != values.end(), Code::internal, "LoRA for {}: there is no value of '{}'", name, p.input);
    Dims dims = value->second.dims();
    if (p.stacked > 0) dims.erase(dims.begin());
    fits(dims, name);
    one.offset = place->second.layer * Shape{DType::f32, dims}.elements();
    Work& w = work[p.input];
    w.value = &value->second;
    w.addends.push_back(one);
  };
  for (const ScaledLora& lora : loras) {
    for (const auto& [component, pairs] : lora.file.pairs)
      for (const auto& [path, pair] : pairs)
        plan(lora.file.name, component, path,
             {&pair, nullptr, lora.scale * pair.alpha / static_cast<double>(pair.rank()), 0},
             [&p = pair](const Dims& dims, const std::string& name) { check_fits(p, dims, name); });
    for (const auto& [component, arrays] : lora.file.differences)
      for (const auto& [path, array] : arrays)
        plan(lora.file.name, component, path, {nullptr, &array, lora.scale, 0},
             [&a = array](const Dims& dims, const std::string& name) {
               check(a.dims() == dims, Code::io, "LoRA for {}: the difference is {}, the parameter {}", name,
                     to_string(a.dims()), to_string(dims));
             });
  }
  std::vector<const Work*> all;
  for (const auto& [name, w] : work) all.push_back(&w);
  std::async(std::launch::async,
             [&] {  // on a thread whose setting of OpenMP ends with it
               parallel_for(static_cast<int64_t>(all.size()), [&](int64_t i, int) {
                 use_one_thread();
                 work_on(*all[static_cast<size_t>(i)]);
               });
             })
      .get();
}

}  // namespace md
