// Denoising steps that reuse predictions of earlier ones instead of running the whole model. Sources: Lyu et al. 2024
// (FasterCache, section 3.3: guidance by frequency, use_cfg_cache); Ma et al. 2025 (MagCache); SenCache
// (arXiv:2602.24208). Which steps these are, and the numbers, are MaxDiffusion's (Wan, inference caches).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/pipelines/sample_keys.h"

namespace md {

/// Steps in a row that one component predicts.
struct SamplingStage {
  std::string denoiser;
  double guidance;
  int64_t first, steps;  // numbers of steps of the whole sampling
};

/// What is known of a sampling before it starts.
struct SamplingPlan {
  std::vector<SamplingStage> stages;
  std::vector<double> times;                 // of each step, as parts of all times: 0 to 1
  int64_t height = 0;                        // pixels
  std::vector<double> magcache_ratios = {};  // of FamilySpec::magcache_ratios
  int64_t steps() const { return static_cast<int64_t>(times.size()); }
};

/// What a cache builds a step's graph of.
struct DenoisingStep {
  /// The model's prediction: of both halves, in rows [negative, positive], or of the positive one.
  std::function<Tensor(bool both)> predict;
  /// Of both halves, with what the blocks added; a residual that was kept replaces the blocks.
  std::function<Prediction(Tensor residual)> predict_with_residual;
  /// One prediction of the two halves: guidance.
  std::function<Tensor(Tensor negative, Tensor positive)> guide;
  Tensor sample;  // [B, …]
};

/// Every step is either computed, and keeps arrays, or reuses those of the last computed one. Computed steps predict
/// what they would without a cache. Not thread safe; one sampling of one batch at a time.
class StepCache {
 public:
  virtual ~StepCache() = default;

  // --- Graphs
  /// A computed step's prediction; `kept` gets what later steps reuse.
  virtual Tensor compute(const DenoisingStep& step, std::vector<Tensor>& kept) const = 0;
  /// A step's prediction from what the last computed one kept. `factors`: f32 [2], see factors().
  virtual Tensor reuse(const DenoisingStep& step, const std::vector<Tensor>& kept, Tensor factors) const = 0;
  /// f32 []: how far the next step's sample is from the last computed one's, where reuses() needs it; else absent.
  virtual Tensor moved(Tensor /*next*/, const std::vector<Tensor>& /*kept*/) const { return {}; }

  // --- Decisions, step by step
  /// Called before the first step of each stage.
  virtual void begin(const SamplingStage&) {}
  /// Whether a step of this stage reuses; asked once for each, in order. `moved`: what the step before it gave.
  virtual bool reuses(const SamplingStage& stage, int64_t step, const std::function<double()>& moved) = 0;
  /// Numbers that reuse() reads at this step.
  virtual std::vector<float> factors(int64_t /*step*/) const { return {0, 0}; }
  /// Of the log: "MagCache", and the text after the counts.
  virtual std::string name() const = 0;
  virtual std::string details() const { return ""; }
};

/// The cache that the keys enable; null: none. Throws invalid_config where it needs guidance that a step does not
/// have, or ratios that the keys lack.
std::unique_ptr<StepCache> make_step_cache(const StepCacheKeys& keys, const SamplingPlan& plan);

/// The share of x [B, …, H, W, C] that varies slowly over H and W: of the rows' frequencies those below H / 4, of the
/// columns' those below (W / 2 + 1) / 4, and at least the mean.
Tensor low_frequencies(Tensor x);

}  // namespace md
