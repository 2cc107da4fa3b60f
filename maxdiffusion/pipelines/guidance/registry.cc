// The lists of guidance methods: a new method is a file and one entry here.
#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/family_spec.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/pipelines/guidance/method.h"

#define GUIDANCE_METHODS(X) \
  X(cfg)                    \
  X(apg)                    \
  X(cfg_zero)               \
  X(cfg_pp)
#define PERTURBED_GUIDANCES(X) \
  X(perturbed_attention)       \
  X(skip_layer)

namespace md {

#define DECLARE_METHOD(name) GuidanceMethod name##_guidance();
GUIDANCE_METHODS(DECLARE_METHOD)
#undef DECLARE_METHOD
#define DECLARE_PERTURBED(name) PerturbedGuidance name##_guidance();
PERTURBED_GUIDANCES(DECLARE_PERTURBED)
#undef DECLARE_PERTURBED

namespace {

const std::vector<GuidanceMethod>& methods() {
#define ENTRY(name) name##_guidance(),
  static const std::vector<GuidanceMethod> all = {GUIDANCE_METHODS(ENTRY)};
  return all;
}

const std::vector<PerturbedGuidance>& perturbed() {
  static const std::vector<PerturbedGuidance> all = {PERTURBED_GUIDANCES(ENTRY)};
#undef ENTRY
  return all;
}

const GuidanceMethod& method_of(const GuidanceKeys& keys) {
  const auto found =
      std::ranges::find_if(methods(), [&](const GuidanceMethod& m) { return keys.guidance_method == m.name; });
  check(found != methods().end(), Code::invalid_config, "guidance_method is '{}'; expected {}", keys.guidance_method,
        one_of(guidance_methods()).text());
  return *found;
}

}  // namespace

std::vector<std::string> guidance_methods() {
  std::vector<std::string> names;
  for (const GuidanceMethod& m : methods()) names.emplace_back(m.name);
  return names;
}

bool GuidanceKeys::guides(int64_t i, int64_t n) const {
  return i >= step_at(guidance_interval[0], n) && i < step_at(guidance_interval[1], n);
}

void GuidanceKeys::validate() const {
  check(guidance_interval.size() == 2 && guidance_interval[0] <= guidance_interval[1], Code::invalid_config,
        "guidance_interval is [{}]; expected two numbers, from and to, as in [0.2, 0.8]",
        fmt::join(guidance_interval, ", "));
  check(freeu.empty() || freeu.size() == 4, Code::invalid_config,
        "freeu is [{}]; expected four numbers, s1, s2, b1 and b2, as in [0.9, 0.2, 1.5, 1.6]", fmt::join(freeu, ", "));
}

Guided guided(const GuidanceKeys& keys, Tensor scale, Tensor negative, Tensor positive, Tensor momentum) {
  return method_of(keys).combine(keys, scale, negative, positive, momentum);
}

Tensor finished(const GuidanceKeys& keys, Tensor prediction, Tensor step) {
  const GuidanceMethod& m = method_of(keys);
  return m.finish ? m.finish(keys, prediction, step) : prediction;
}

Axes axes_of_sample(Tensor x) {
  Axes axes;
  for (int64_t i = 1; i < x.rank(); ++i) axes.push_back(i);
  return axes;
}

Tensor scaled(Tensor x, Tensor scale) { return x * broadcast_to(cast(scale, x.dtype()), x.dims()); }

Tensor total_of_sample(Tensor x) { return sum(x, axes_of_sample(x), true); }

Tensor rescaled(Tensor x, Tensor positive, double phi) {
  auto deviation = [](Tensor t) {
    const Axes axes = axes_of_sample(t);
    return sqrt(mean(square(t - mean(t, axes, true)), axes, true));
  };
  return x * (deviation(positive) / deviation(x) * phi + (1 - phi));
}

const PerturbedGuidance* perturbed_guidance(const GuidanceKeys& keys) {
  const PerturbedGuidance* enabled = nullptr;
  for (const PerturbedGuidance& p : perturbed()) {
    if (p.scale(keys) == 0) continue;
    check(!enabled, Code::invalid_config, "{} is {} with {}={}; expected one of them at most", p.key, p.scale(keys),
          enabled ? enabled->key : "", enabled ? enabled->scale(keys) : 0);
    enabled = &p;
  }
  return enabled;
}

void check_guidance(const GuidanceKeys& keys, const FamilySpec& spec) {
  keys.validate();
  if (const PerturbedGuidance* p = perturbed_guidance(keys)) p->layers(keys, spec);
  check(keys.freeu.empty() || spec.has_freeu, Code::invalid_config,
        "freeu is [{}]; expected none: this model is no UNet", fmt::join(keys.freeu, ", "));
}

}  // namespace md
