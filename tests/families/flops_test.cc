// Floating-point operations of a training step, by what is trained.
#include <gtest/gtest.h>

#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/tasks/denoise.h"
#include "maxdiffusion/train/step.h"
#include "tests/tiny_folder.h"

namespace md {
namespace {

/// Operations of the loss's forward pass.
double forward(const DenoiseTask& task) {
  Graph g;
  ParamTable params;
  Feed feed;
  for (const BatchField& f : task.batch()) feed[f.name] = g.input(f.name, f.shape);
  const Models models = [&](const std::string& component) { return Scope(g, params, component); };
  return count_flops(g, {task.loss(models, feed, Rng::seed(g, 1))});
}

double step(const DenoiseTask& task, const StepOptions& options = {}) { return trace_step(task, {}, options).flops; }

TEST(StepFlops, OfAWholeModelAreThreeTimesItsForwardPass) {
  const double once = forward(tiny_task());
  EXPECT_LT(step(tiny_task()), 3 * once);  // the latents need no gradient
  EXPECT_GT(step(tiny_task()), 2.95 * once);
}

TEST(StepFlops, OfFrozenEncodersAreOnlyTheirForwardPass) {
  DenoiseTask encodes = tiny_task();
  encodes.text = tokens_input();
  const StepOptions frozen{.change_scope = [](const std::string& component, const Scope& scope) {
    return component == "unet" ? scope : scope.frozen();
  }};
  const double text = forward(encodes) - forward(tiny_task());
  EXPECT_GT(text, 0);
  EXPECT_DOUBLE_EQ(step(encodes, frozen) - step(tiny_task()), text);
}

TEST(StepFlops, OfFrozenWeightsUnderLoraAreTwiceTheirForwardPass) {
  const StepOptions lora{.change_scope = [](const std::string&, const Scope& scope) {
    return lora_scope(scope, {.rank = 1, .alpha = 1, .targets = {"to_q", "to_k", "to_v", "to_out.0"}});
  }};
  const double once = forward(tiny_task());
  EXPECT_LT(step(tiny_task(), lora), 2.2 * once);
  EXPECT_GT(step(tiny_task(), lora), 1.5 * once);  // layers before the first LoRA matrices need no gradients
}

TEST(StepFlops, DoNotCountWhatIsRecomputedNorHowLayersAreWritten) {
  const double plain = step(tiny_task());
  for (const char* remat : {"FULL", "MATMUL_WITHOUT_BATCH"})
    EXPECT_DOUBLE_EQ(step(tiny_task(), {.scope = {.remat = remat}}), plain) << remat;
  EXPECT_DOUBLE_EQ(step(tiny_task(), {.scope = {.remat = "FULL", .scan_layers = true}}), plain);
  DenoiseTask half = tiny_task();
  half.batch_size = 2;
  EXPECT_DOUBLE_EQ(step(half, {.accumulation = 2}), plain);
}

}  // namespace
}  // namespace md
