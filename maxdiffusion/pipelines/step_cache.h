// Denoising steps that reuse predictions of earlier steps instead of running the whole model. Sources: Lyu et al. 2024
// (FasterCache, section 3.3: guidance by frequency, use_cfg_cache); Ma et al. 2025 (MagCache); SenCache
// (arXiv:2602.24208); those of models/step_reuse.h. Of the first three, the choice of steps and the constants are
// MaxDiffusion's (Wan, inference caches); TeaCache computes the first and the last step, as its authors' code for FLUX.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/pipelines/sample_keys.h"

namespace md {

/// Consecutive steps that one denoiser predicts.
struct SamplingStage {
  std::string denoiser;
  double guidance;
  int64_t first, steps;    // first step's number among all steps, and number of steps
  bool perturbed = false;  // perturbed_guidance applies
};

/// Properties of a sampling that are known before it starts.
struct SamplingPlan {
  std::vector<SamplingStage> stages;
  std::vector<double> times;                       // of each step, as a fraction of all times: 0 to 1
  int64_t height = 0;                              // pixels
  std::vector<double> magcache_ratios = {};        // from FamilySpec::magcache_ratios
  std::vector<double> teacache_coefficients = {};  // from FamilySpec::teacache_coefficients
  int64_t steps() const { return static_cast<int64_t>(times.size()); }
};

/// Functions from which a cache builds the graph of a step.
struct DenoisingStep {
  /// The model's prediction. `all`: all rows, [negative, positive] with guidance, followed by those of
  /// perturbed_guidance; else the positive ones alone.
  std::function<Tensor(bool all)> predict;
  /// predict(true), in which the denoiser reuses parts of an earlier step.
  std::function<Tensor(StepReuse&)> predict_reusing;
  /// Guidance: combines the predictions of the two halves.
  std::function<Tensor(Tensor negative, Tensor positive)> guide;
  /// Combines the rows of predict(true) into one prediction.
  std::function<Tensor(Tensor all)> combine;
  Tensor sample;  // [B, …]
};

/// What the graph of a computed step makes.
struct CachedStep {
  Tensor prediction;
  std::vector<Tensor> arrays = {};  // that later steps reuse
  Tensor reused = {};               // f32 []: 1 if the device decided to reuse the arrays of an earlier step, else 0
};

/// Every step is either computed, and caches arrays, or reuses the arrays of the last computed step. Computed steps
/// predict the same as without a cache. Not thread safe; one sampling of one batch at a time.
class StepCache {
 public:
  virtual ~StepCache() = default;

  // --- Graphs
  /// Whether the graph of a computed step decides whether to reuse arrays: no step has the other graph.
  virtual bool decides_on_device() const { return false; }
  /// A computed step. If the device decides, `before` has the arrays of the step before it, zeros at the beginning of a
  /// stage, and `factors` is f32 [2], see factors(); else they are empty and absent. `before` is empty too while the
  /// arrays' shapes are not known.
  virtual CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>& before, Tensor factors) const = 0;
  /// A step's prediction from the arrays that the last computed step cached. `factors`: f32 [2], see factors().
  virtual Tensor reuse(const DenoisingStep& step, const std::vector<Tensor>& cached, Tensor factors) const = 0;
  /// f32 []: distance of the next step's sample from that of the last computed step, if reuses() needs it; else absent.
  virtual Tensor moved(Tensor /*next*/, const std::vector<Tensor>& /*kept*/) const { return {}; }

  // --- Decisions, step by step
  /// Called before the first step of each stage.
  virtual void begin(const SamplingStage&) {}
  /// Whether a step of this stage reuses; called once for each step, in order. `moved`: moved() of the previous step.
  virtual bool reuses(const SamplingStage& stage, int64_t step, const std::function<double()>& moved) = 0;
  /// Input `factors` of this step's graph.
  virtual std::vector<float> factors(const SamplingStage& /*stage*/, int64_t /*step*/) const { return {0, 0}; }
  /// For the log: "MagCache", and text after the counts.
  virtual std::string name() const = 0;
  virtual std::string details() const { return ""; }
};

/// Throws invalid_config, naming the key, if a cache that the keys enable is not for such models. controls: whether
/// ControlNets act.
void check_step_cache(const StepCacheKeys& keys, const FamilySpec& spec, bool controls);
/// The cache that the keys enable; null: none. Throws invalid_config if it needs guidance in a step without guidance,
/// or ratios that the keys do not set.
std::unique_ptr<StepCache> make_step_cache(const StepCacheKeys& keys, const SamplingPlan& plan);

/// The low frequencies of x [B, …, H, W, C] over H and W: below H / 4 along the rows and below (W / 2 + 1) / 4 along
/// the columns, at least the mean.
Tensor low_frequencies(Tensor x);

}  // namespace md
