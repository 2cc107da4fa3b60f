// The number of instructions in the compiled training step of the bench's models, which determines compile, load and
// start time. Expected values are for the pinned plugin.
#include <gtest/gtest.h>

#include "bench/models.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/train/step.h"
#include "tests/one_device.h"

namespace md {
namespace {

AheadOfTime step_of(const char* model, DType activations) {
  const auto task = make_bench_task(model, 0, 64);
  const AxisRules rules = AxisRules::defaults();
  ScopeOptions scope;
  scope.activations = activations;
  OptimConfig optim;
  optim.lr_scheduler = "constant";
  GraphOptions options = one_device().graph_options(&rules);
  options.cpu_kernels = {.callable = true, .f32_products = true, .bf16_products = true};  // on every processor
  const StepGraph step = trace_step(*task, options, {.scope = scope, .optim = optim.with_switches(true)});
  return compile_ahead(one_device(), *step.graph, {.jax_cache_dir = "off", .xla_flags = ""}, model);
}

// Measured: 185 in both types.
// P-22
TEST(ProgramSize, OfTheUNetsStepAreFewAndFewOnlyChangeATypeInBf16) {
  const AheadOfTime bf16 = step_of("unet", DType::bf16);
  EXPECT_GT(bf16.instructions, 50);  // the count works
  EXPECT_LE(bf16.instructions, 250);
  EXPECT_LE(bf16.type_changes, 30);
  EXPECT_LE(bf16.custom_calls.at("md_fused_calls").operations, 100);
  EXPECT_EQ(bf16.custom_calls.at("md_attention").operations, 34 * 2)
      << "two in each transformer layer, all within runs";
  const AheadOfTime f32 = step_of("unet", DType::f32);
  EXPECT_LE(f32.instructions, 250);
  EXPECT_EQ(f32.type_changes, 0);
}

}  // namespace
}  // namespace md
