// The graphs of denoising steps: what one program of a sampling computes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/pipelines/step_cache.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

using ScopeOf = std::function<Scope(const std::string& component)>;

/// What the graphs of one stage of steps have in common.
struct StageGraph {
  const Family& family;
  const Scheduler& scheduler;
  const SamplingStage& stage;
  const PromptConditioning& prompts;
  const SampleOptions& options;
  int64_t batch, columns;                // columns: of the scheduler's table
  std::map<std::string, Shape> context;  // Family::prompt_cache where a graph of its own makes it

  bool guided() const { return stage.guidance > 1; }
  int64_t calls() const { return guided() ? 2 * batch : batch; }
  Models models(const ScopeOf& scope, Graph& g) const {
    return [this, &scope, &g](const std::string& component) {
      return scope(component == family.spec().denoiser() ? stage.denoiser : component).in_graph(g);
    };
  }
};

/// Inputs: the fields of the conditioning, with guidance the same with the prefix negative_. With guidance the rows are
/// [negative, positive].
Conditioning prompt_inputs(Graph& g, const StageGraph& steps);

/// `count` denoising steps of `batch` samples. Inputs: sample [B, …] and history0 …, which are the outputs too; rows
/// [count, columns] and timesteps [count] of the scheduler's table, start s32 [] (the number of the first step); key
/// u32 [2] and first s32 [] (the number of the first sample); with a ControlNet control_image [B, H, W, C] and scales
/// [count]; prompt_inputs; StageGraph::context.
void build_steps(Graph& g, const ScopeOf& scope, const StageGraph& steps, int64_t count, const Dims& latent);

/// One step with a cache, with the inputs of build_steps; `reused`: with factors f32 [2] besides. Arrays kept0 … are
/// handed on by a computed step and read by a reused one. Output moved f32 [], where the cache needs it.
/// `kept`: the shapes of these arrays; a computed step's graph fills it.
void build_cached_step(Graph& g, const ScopeOf& scope, const StageGraph& steps, const Dims& latent,
                       const StepCache& cache, bool reused, std::vector<Shape>& kept);

}  // namespace md
