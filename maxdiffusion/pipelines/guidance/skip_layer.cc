// Skip-layer guidance: leads away from a transformer without some of its blocks, in the steps that determine the
// composition. Source: diffusers' SkipLayerGuidance.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/family_spec.h"
#include "maxdiffusion/pipelines/guidance/method.h"

namespace md {
namespace {

bool acts(const GuidanceKeys& keys, int64_t i, int64_t n) {
  return i > step_at(keys.skip_layer_guidance_start, n) && i < step_at(keys.skip_layer_guidance_stop, n);
}

Perturbation layers(const GuidanceKeys& keys, const FamilySpec& spec) {
  check(!spec.blocks.empty(), Code::invalid_config,
        "skip_layer_guidance_scale is {}; expected 0: this model is no sequence of blocks",
        keys.skip_layer_guidance_scale);
  check(!keys.skip_layer_guidance_layers.empty(), Code::invalid_config,
        "skip_layer_guidance_layers is empty; expected numbers of blocks, 0 to {}, with skip_layer_guidance_scale={}",
        spec.block_count - 1, keys.skip_layer_guidance_scale);
  check(keys.skip_layer_guidance_start <= keys.skip_layer_guidance_stop, Code::invalid_config,
        "skip_layer_guidance_start is {}; expected at most skip_layer_guidance_stop={}", keys.skip_layer_guidance_start,
        keys.skip_layer_guidance_stop);
  Perturbation p{.blocks = spec.blocks};
  for (const int64_t block : keys.skip_layer_guidance_layers) {
    check(block >= 0 && block < spec.block_count, Code::invalid_config,
          "skip_layer_guidance_layers has {}; expected 0 to {}: this model has {} {}", block, spec.block_count - 1,
          spec.block_count, spec.blocks);
    p.skipped.insert(block);
  }
  return p;
}

/// If there is no prediction without the prompt, diffusers starts from the perturbed one.
Tensor factor(const GuidanceKeys& keys, bool guided, Tensor time) {
  return full(time.graph(), keys.skip_layer_guidance_scale - (guided ? 0 : 1), time.shape());
}

}  // namespace

PerturbedGuidance skip_layer_guidance() {
  return {.name = "skip-layer guidance",
          .key = "skip_layer_guidance_scale",
          .scale = [](const GuidanceKeys& keys) { return keys.skip_layer_guidance_scale; },
          .acts = acts,
          .layers = layers,
          .factor = factor};
}

}  // namespace md
