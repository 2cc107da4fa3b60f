// Graphs of denoising steps, each for one program of a sampling.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/pipelines/step_cache.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

using ScopeOf = std::function<Scope(const std::string& component)>;

/// What all graphs of one stage share.
struct StageGraph {
  const Family& family;
  const Scheduler& scheduler;
  const SamplingStage& stage;
  const PromptConditioning& prompts;
  const SampleOptions& options;
  int64_t batch, columns;                // columns: of the scheduler's table
  std::map<std::string, Shape> context;  // shapes of Family::prompt_cache, if a separate graph computes it

  bool guided() const { return stage.guidance > 1; }
  /// Number of parts in the rows of a call, out of [negative, positive, further ones of prompts with AND, perturbed].
  int64_t parts() const { return 1 + (guided() ? 1 + std::ssize(prompts.further) : 0) + (stage.perturbed ? 1 : 0); }
  int64_t calls() const { return parts() * batch; }
  /// Number of rows before the perturbed ones.
  int64_t unperturbed() const { return guided() ? 2 * batch : batch; }
  Models models(const ScopeOf& scope, Graph& g) const;
};

/// Inputs: the fields of the conditioning; with guidance also those with the prefixes of inputs_of. With guidance rows
/// are [negative, positive, further], with perturbed guidance followed by positive again.
Conditioning prompt_inputs(Graph& g, const StageGraph& steps);

/// `count` denoising steps of `batch` samples. Inputs: sample [B, …] and history0 …, which are also outputs; rows
/// [count, columns] and timesteps [count] of the scheduler's table; start s32 [], number of the first step; key u32
/// [2]; first s32 [], number of the first sample; with ControlNets control_image_field [B, H, W, C] each and scales
/// [count, ControlNets]; with a mask mask [B, h, w, 1], image_latents and noise [B, …], and levels [count, 2], the
/// noise level after each step; in guided stages with GuidanceKeys::renoises, renoise [count] of SampleTable;
/// prompt_inputs, with AND in prompts prompt_weights [B, parts]; StageGraph::context. In guided stages, guidance with
/// momentum adds one history after the scheduler's. With SampleOptions::preview_every, one step has an input prediction
/// [2], factors of the sample and the model's output, and an output preview [B, …], their sum.
void build_steps(Graph& g, const ScopeOf& scope, const StageGraph& steps, int64_t count, const Dims& latent);

/// One step with a cache, with the inputs of build_steps; with `reused`, or if the device decides, also factors f32
/// [2]. Arrays kept0 … are outputs of a computed step and inputs of a reused one. Output moved f32 [], if the cache
/// needs it; reused f32 [], if the device decides. `cached`: shapes of the arrays kept0 …; the graph of a computed step
/// fills it, or reads it if it is filled.
void build_cached_step(Graph& g, const ScopeOf& scope, const StageGraph& steps, const Dims& latent,
                       const StepCache& cache, bool reused, std::vector<Shape>& cached);

}  // namespace md
