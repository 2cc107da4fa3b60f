// Guidance: combines a step's predictions with and without the prompt and, with perturbed layers, that of the perturbed
// model. Each method is a file of pipelines/guidance/ and an entry of its registry.cc; shared code is here. Source: Lin
// et al. 2023, section 3.4 (rescale). Details follow diffusers' guiders and pipelines.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/nn/perturbation.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {

struct FamilySpec;

/// The values of guidance_method, in the registry's order.
std::vector<std::string> guidance_methods();

struct GuidanceKeys {
  std::string guidance_method = "cfg";
  std::vector<double> guidance_interval = {0, 1};
  double apg_eta = 1, apg_norm_threshold = 15, apg_momentum = 0;
  int64_t cfg_zero_init_steps = 1;
  double cfg_pp_lambda = 0.6;
  double pag_scale = 0, pag_adaptive_scale = 0;
  std::vector<std::string> pag_applied_layers = {"mid"};
  double skip_layer_guidance_scale = 0, skip_layer_guidance_start = 0.01, skip_layer_guidance_stop = 0.2;
  std::vector<int64_t> skip_layer_guidance_layers;
  std::vector<double> freeu;
  template <class V>
  void visit(V&& v) {
    v("guidance_method", guidance_method,
      "how predictions with and without the prompt are combined: cfg, apg (adaptive projected guidance), cfg_zero "
      "(CFG-Zero*), cfg_pp (CFG++)",
      one_of(guidance_methods()));
    v("guidance_interval", guidance_interval,
      "part of the steps that are guided, from and to: [0.2, 0.8]; elsewhere the model runs only with the prompt",
      in_range(0, 1));
    v("apg_eta", apg_eta, "guidance_method=apg: share of the guidance that is parallel to the prediction", finite());
    v("apg_norm_threshold", apg_norm_threshold,
      "guidance_method=apg: largest norm of the difference of the two predictions; 0: any", at_least(0));
    v("apg_momentum", apg_momentum,
      "guidance_method=apg: share of the earlier steps' differences that is added, mostly negative; 0: none", finite());
    v("cfg_zero_init_steps", cfg_zero_init_steps, "guidance_method=cfg_zero: first steps whose prediction is zero",
      at_least(0));
    v("cfg_pp_lambda", cfg_pp_lambda,
      "guidance_method=cfg_pp: the way from the prediction without the prompt to that with it, in place of "
      "guidance_scale",
      in_range(0, 1));
    v("pag_scale", pag_scale,
      "strength of perturbed attention guidance (PAG), which costs one more prediction a step; 0: off", at_least(0));
    v("pag_adaptive_scale", pag_adaptive_scale,
      "pag_scale decreases by this much for each timestep below the first one, down to 0", at_least(0));
    v("pag_applied_layers", pag_applied_layers,
      "regular expressions of the self attentions that pag_scale perturbs, as mid, or down_blocks.1");
    v("skip_layer_guidance_scale", skip_layer_guidance_scale,
      "strength of skip-layer guidance, which costs one more prediction a step, without some blocks; 0: off",
      at_least(0));
    v("skip_layer_guidance_start", skip_layer_guidance_start, "part of the steps before skip-layer guidance acts",
      in_range(0, below(1)));
    v("skip_layer_guidance_stop", skip_layer_guidance_stop, "part of the steps after which it no longer acts",
      in_range(0, 1));
    v("skip_layer_guidance_layers", skip_layer_guidance_layers, "numbers of the blocks that are skipped, from 0",
      at_least(0));
    v("freeu", freeu,
      "FreeU of UNets: s1, s2 (skip connections of the first and the second level), b1, b2 (half of the other "
      "channels), as in [0.9, 0.2, 1.5, 1.6]; empty: off",
      at_least(0));
  }
  /// Whether differences are carried from step to step.
  bool has_momentum() const { return guidance_method == "apg" && apg_momentum != 0; }
  /// Whether the new sample gets the noise of the prediction without the prompt (SampleTable::renoise).
  bool renoises() const { return guidance_method == "cfg_pp"; }
  /// Whether step `i` of `n` is guided: floor(from·n) ≤ i < floor(to·n).
  bool guides(int64_t i, int64_t n) const;
  /// Throws invalid_config for an invalid interval.
  void validate() const;
};

struct Guided {
  Tensor prediction, momentum;  // momentum: input of the next step, with has_momentum()
};

/// scale: f32 [], guidance_scale. negative, positive: [B, …], predictions without and with the prompt. momentum: [B,
/// …], of the previous step, initially zeros; absent without has_momentum().
Guided guided(const GuidanceKeys& keys, Tensor scale, Tensor negative, Tensor positive, Tensor momentum);
/// The method's final change of the guided prediction: cfg_zero returns zeros in its first cfg_zero_init_steps. step:
/// s32 [], number of the step.
Tensor finished(const GuidanceKeys& keys, Tensor prediction, Tensor step);

/// φ·(x·σ(positive)/σ(x)) + (1 − φ)·x, deviations over all axes but the first.
Tensor rescaled(Tensor x, Tensor positive, double phi);

/// Guidance away from a model that lacks some of its layers.
struct PerturbedGuidance {
  const char* name;  // "perturbed attention guidance"
  const char* key;   // key of its scale, which is 0 if off
  double (*scale)(const GuidanceKeys&);
  /// Whether it applies to step `i` of `n`.
  bool (*acts)(const GuidanceKeys&, int64_t i, int64_t n);
  /// The perturbed layers, without `first`. Throws invalid_config if the family has no such layers.
  Perturbation (*layers)(const GuidanceKeys&, const FamilySpec&);
  /// The factor of positive − perturbed, f32 [] or a number. `guided`: there is a prediction without the prompt. time:
  /// f32 [], the timestep of 1000.
  Tensor (*factor)(const GuidanceKeys&, bool guided, Tensor time);
};
/// The perturbed guidance that the keys enable; null: none. Throws invalid_config if they enable several.
const PerturbedGuidance* perturbed_guidance(const GuidanceKeys& keys);
/// Throws invalid_config, naming the key, if the family's models do not support a key or keys exclude each other.
void check_guidance(const GuidanceKeys& keys, const FamilySpec& spec);

}  // namespace md
