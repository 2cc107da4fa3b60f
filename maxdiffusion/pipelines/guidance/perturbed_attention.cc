// Perturbed attention guidance: leads away from a model in which some self attentions return each token's own value.
// Source: Ahn et al. 2024; details as in diffusers' pag pipelines.
#include <fmt/ranges.h>

#include <algorithm>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/family_spec.h"
#include "maxdiffusion/pipelines/guidance.h"

namespace md {
namespace {

Perturbation layers(const GuidanceKeys& keys, const FamilySpec& spec) {
  check(!spec.self_attentions.empty(), Code::invalid_config,
        "pag_scale is {}; expected 0: this model has no self attention that can be perturbed", keys.pag_scale);
  check(!keys.pag_applied_layers.empty(), Code::invalid_config,
        "pag_applied_layers is empty; expected names, as mid, with pag_scale={}", keys.pag_scale);
  Perturbation p;
  for (const std::string& text : keys.pag_applied_layers) {
    const size_t before = p.attentions.size();
    bool found = false;
    try {
      const std::regex expression(text);
      for (const std::string& path : spec.self_attentions)
        if (std::regex_search(path, expression)) p.attentions.insert(path), found = true;
    } catch (const std::regex_error&) {
      fail(Code::invalid_config, "pag_applied_layers has '{}', which is no regular expression", text);
    }
    if (found || p.attentions.size() > before) continue;
    throw Error(Code::invalid_config,
                fmt::format("pag_applied_layers has '{}', which is in no name of this model's self attentions", text))
        .note(fmt::format("their names: {}", fmt::join(spec.self_attentions, ", ")));
  }
  return p;
}

Tensor factor(const GuidanceKeys& keys, bool, Tensor time) {
  Tensor scale = full(time.graph(), keys.pag_scale, time.shape());
  if (keys.pag_adaptive_scale == 0) return scale;
  return relu(scale - (1000.0 - time) * keys.pag_adaptive_scale);
}

}  // namespace

PerturbedGuidance perturbed_attention_guidance() {
  return {.name = "perturbed attention guidance",
          .key = "pag_scale",
          .scale = [](const GuidanceKeys& keys) { return keys.pag_scale; },
          .acts = [](const GuidanceKeys&, int64_t, int64_t) { return true; },
          .layers = layers,
          .factor = factor};
}

}  // namespace md
