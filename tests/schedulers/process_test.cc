// Noise processes: which a config asks for, and what flow matching draws and weighs.
#include "maxdiffusion/schedulers/process.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/schedulers/scheduler_keys.h"
#include "tests/one_device.h"

namespace md {
namespace {

using nlohmann::json;

const json kFlow = {{"prediction_type", "flow_prediction"}};

std::string refusal(const json& config, const ProcessKeys& keys) {
  try {
    make_process(config, keys);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

/// f of a graph of its own, computed.
template <class F>
std::vector<double> computed(F f) {
  Graph g(one_device().graph_options());
  g.output("y", f(g));
  return evaluate(one_device(), g, {})[0].to_doubles();
}

Tensor times(Graph& g, const std::vector<float>& t) {
  return constant(g, HostArray::of<float>({DType::f32, {static_cast<int64_t>(t.size())}}, t));
}

ProcessKeys looked_up(const std::string& how) {
  ProcessKeys keys;
  keys.timestep_lookup = how;
  return keys;
}

// P-5
TEST(Process, FollowsFromThePredictionType) {
  EXPECT_EQ(make_process(kFlow, {})->timestep_dtype(), DType::f32);
  EXPECT_EQ(make_process({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}, {})->timestep_dtype(), DType::f32);
  EXPECT_EQ(make_process({{"prediction_type", "v_prediction"}}, {})->timestep_dtype(), DType::s32);
  EXPECT_EQ(make_process(json::object(), {})->timestep_dtype(), DType::s32);
  EXPECT_EQ(process_names(), (std::vector<std::string>{"flow_match", "ddpm"}));
}

// P-9
TEST(Process, RefusesUnsupportedKeys) {
  ProcessKeys snr, bias, shift;
  snr.snr_gamma = 5;
  bias.timestep_bias = {{"strategy", "\"later\""}};
  shift.train_flow_shift = 0;
  EXPECT_NE(refusal(kFlow, snr).find("snr_gamma is 5"), std::string::npos);
  EXPECT_NE(refusal(kFlow, bias).find("timestep_bias is set"), std::string::npos);
  EXPECT_NE(refusal(kFlow, shift).find("train_flow_shift is 0"), std::string::npos);
  EXPECT_NE(
      refusal(kFlow, looked_up("table")).find("timestep_lookup is 'table'; expected one of: exact, reference_table"),
      std::string::npos);
  EXPECT_NE(refusal(json::object(), looked_up("reference_table")).find("timestep_lookup is 'reference_table'"),
            std::string::npos);
  bias.timestep_bias = {{"strategy", "\"none\""}, {"portion", "0.5"}};
  EXPECT_NO_THROW(make_process(kFlow, bias));
  bias.timestep_bias = {{"portion", "2"}};
  EXPECT_NE(refusal(json::object(), bias).find("portion is 2"), std::string::npos);
}

// P-5
TEST(FlowMatch, TimesAreShiftedTowardsNoise) {
  // u uniform, τ = s·u / (1 + (s − 1)·u): the median of τ is s / (1 + s), its quarters those of u shifted likewise.
  for (double s : {1.0, 3.0}) {
    ProcessKeys keys;
    keys.train_flow_shift = s;
    const auto process = make_process(kFlow, keys);
    std::vector<double> t = computed([&](Graph& g) {
      const uint32_t key[2] = {1, 2};
      return process->sample_timesteps(Rng(constant(g, HostArray::of<uint32_t>({DType::u32, {2}}, key))), 20000);
    });
    std::ranges::sort(t);
    EXPECT_GE(t.front(), 0);
    EXPECT_LT(t.back(), 1000);
    for (double u : {0.25, 0.5, 0.75})
      EXPECT_NEAR(t[static_cast<size_t>(u * 20000)], 1000 * s * u / (1 + (s - 1) * u), 10) << s << ", " << u;
  }
}

TEST(FlowMatch, RestrictedTimestepsHaveTheirProbability) {
  const auto whole = make_process(kFlow, {});
  const auto low = whole->restricted_to(0, 875), high = whole->restricted_to(875, 1000);
  std::vector<double> t = computed([&](Graph& g) { return whole->sample_timesteps(Rng::seed(g, 3), 20000); });
  const auto above = static_cast<double>(std::ranges::count_if(t, [](double v) { return v >= 875; }));
  EXPECT_EQ(whole->probability(), 1);
  EXPECT_NEAR(high->probability(), above / 20000, 0.013);  // four deviations
  EXPECT_NEAR(low->probability() + high->probability(), 1, 1e-12);
  for (double v : t) EXPECT_NE(low->contains(v), high->contains(v)) << v;
  EXPECT_TRUE(high->contains(1000));
  EXPECT_TRUE(low->contains(0));
  t = computed([&](Graph& g) { return high->sample_timesteps(Rng::seed(g, 3), 1000); });
  for (double v : t) EXPECT_TRUE(high->contains(v)) << v;
}

// P-5
TEST(FlowMatch, WeightsAreABellOverTheGrid) {
  // The numbers of the specification for shift 3 (schedulers.md, section 13).
  const std::vector<double> w = computed([](Graph& g) {
    return make_process(kFlow, {})->weight(times(g, {500, 1000, 9, 125, 250, 750, 875}));
  });
  const std::vector<double> expected = {1.7943, 0, 0.049, 0.682, 1.257, 1.258, 0.677};
  for (size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(w[i], expected[i], 0.003) << i;
  ProcessKeys keys;
  keys.disable_training_weights = true;
  Graph g(one_device().graph_options());
  EXPECT_FALSE(make_process(kFlow, keys)->weight(times(g, {500})));
  EXPECT_FALSE(make_process(kFlow, {})->unweighted()->weight(times(g, {500})));
}

// P-5
TEST(FlowMatch, MixesDataAndNoiseOnAStraightLine) {
  for (const auto& [how, least] : {std::pair{"exact", 0.0}, {"reference_table", 0.003 / 1.002}}) {
    const std::vector<double> y = computed([&](Graph& g) {
      const auto process = make_process(kFlow, looked_up(how));
      Tensor x0 = reshape(times(g, {2, 2}), {2, 1}), noise = reshape(times(g, {-1, -1}), {2, 1});
      Tensor t = times(g, {0, 500});
      return concatenate({process->add_noise(x0, noise, t), process->target(x0, noise, t)}, 0);
    });
    EXPECT_NEAR(y[0], 2 - 3 * least, 1e-6) << how;
    EXPECT_NEAR(y[1], 2 - 3 * (1 + least) / 2, 1e-6) << how;
    EXPECT_EQ(y[2], -3);
    EXPECT_EQ(y[3], -3);
  }
}

/// Each step's level and the time that the model is given there: of data 0 and noise 1 the sample is its level.
std::vector<std::pair<double, double>> levels_and_times_of_sampling(const json& config, int64_t steps) {
  const auto sampler = make_scheduler(config);
  const SampleTable table = sampler->table(steps);
  std::vector<double> levels = computed([&](Graph& g) {
    const Tensor rows = constant(g, table.rows), velocity = reshape(times(g, {1}), {1, 1});
    std::vector<Tensor> state(static_cast<size_t>(1 + sampler->history()), velocity * 0.0), visited;
    state[0] = velocity * table.init_noise_sigma;
    for (int64_t i = 0; i < steps; ++i) {
      visited.push_back(state[0]);
      const Tensor row = reshape(slice_axis(rows, 0, i, i + 1), {rows.dim(1)});
      state = sampler->step(velocity, state[0], row, {state.begin() + 1, state.end()}, Rng::seed(g, 1));
    }
    return concatenate(visited, 0);
  });
  std::vector<std::pair<double, double>> out;
  for (size_t i = 0; i < levels.size(); ++i) out.emplace_back(levels[i], table.timesteps[i]);
  return out;
}

TEST(FlowMatch, ALevelHasTheTimeThatSamplingGivesIt) {
  // Of Wan and of FLUX.1. UniPC gives whole times, as diffusers' does: those of training without their fraction.
  for (const auto& [name, shifted_by] :
       {std::pair{"UniPCMultistepScheduler", "flow_shift"}, std::pair{"FlowMatchEulerDiscreteScheduler", "shift"}})
    for (double shift : {1.0, 3.0, 5.0}) {
      const json config = {{"_class_name", name},
                           {"prediction_type", "flow_prediction"},
                           {"use_flow_sigmas", std::string(name).starts_with("UniPC")},
                           {shifted_by, shift}};
      const auto sampling = levels_and_times_of_sampling(config, 6);
      std::vector<float> levels;
      for (const auto& [level, time] : sampling) levels.push_back(static_cast<float>(level));
      ProcessKeys keys;
      keys.train_flow_shift = shift;
      const auto process = make_process(config, keys);
      const HostArray trained = process->timesteps_from_sigmas(HostArray::of<float>({DType::f32, {6}}, levels));
      const std::vector<double> seen = computed([&](Graph& g) {
        const Tensor t = process->model_timestep(constant(g, trained)), one = reshape(t * 0.0 + 1.0, {6, 1});
        return concatenate({reshape(t, {6, 1}), process->add_noise(one * 0.0, one, t)}, 0);
      });
      for (size_t i = 0; i < 6; ++i) {
        const auto [level, time] = sampling[i];
        EXPECT_NEAR(seen[i], 1000 * level, 1e-3) << name << " " << shift << " " << i;
        EXPECT_NEAR(seen[6 + i], level, 1e-6) << name << " " << shift << " " << i;
        const bool whole = std::string(name).starts_with("UniPC");  // between 0 and 1 below
        EXPECT_NEAR(whole ? time + 0.5 : time, seen[i], whole ? 0.51 : 1e-3) << name << " " << shift << " " << i;
      }
    }
  const float middle[] = {0.5F};
  const HostArray half = HostArray::of<float>({DType::f32, {1}}, middle);
  EXPECT_NEAR(make_process(kFlow, {})->timesteps_from_sigmas(half).to_doubles()[0], 500, 1e-4);
  EXPECT_NEAR(make_process(kFlow, looked_up("reference_table"))->timesteps_from_sigmas(half).to_doubles()[0], 498.4985,
              1e-3);
}

// S4-43, S4-45, S4-46, P-2
TEST(SchedulerKeys, WhatTrainingReadsIsTheSameInBothConfigs) {
  const SchedulerKeys keys{.prediction_type = "v_prediction",
                           .diffusion_scheduler_config = {{"_class_name", "\"DDIMScheduler\""},
                                                          {"rescale_zero_terminal_snr", "true"},
                                                          {"timestep_spacing", "\"trailing\""},
                                                          {"beta_start", "\"\""}}};
  const std::string file = R"({"_class_name": "PNDMScheduler", "beta_start": 0.00085, "steps_offset": 1})";
  EXPECT_EQ(sampling_config(file, keys), json({{"_class_name", "DDIMScheduler"},
                                               {"beta_start", 0.00085},
                                               {"steps_offset", 1},
                                               {"rescale_betas_zero_snr", true},
                                               {"timestep_spacing", "trailing"},
                                               {"prediction_type", "v_prediction"}}));
  EXPECT_EQ(training_config(file, keys), json({{"_class_name", "PNDMScheduler"},
                                               {"beta_start", 0.00085},
                                               {"steps_offset", 1},
                                               {"rescale_betas_zero_snr", true},
                                               {"prediction_type", "v_prediction"}}));
}

TEST(SchedulerKeys, MappingForNoiseModelsIsIgnoredByFlowMatching) {
  const std::string file = R"({"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"})";
  SchedulerKeys keys{.diffusion_scheduler_config = {{"_class_name", "\"EulerDiscreteScheduler\""},
                                                    {"prediction_type", "\"epsilon\""}}};
  EXPECT_EQ(sampling_config(file, keys), parse_json(file));
  EXPECT_EQ(training_config(file, keys), parse_json(file));
  keys.diffusion_scheduler_config["prediction_type"] = "\"flow_prediction\"";
  EXPECT_EQ(sampling_config(file, keys)["_class_name"], "EulerDiscreteScheduler");
  keys.diffusion_scheduler_config["prediction_type"] = "\"\"";
  EXPECT_EQ(sampling_config(file, keys)["_class_name"], "EulerDiscreteScheduler");
  keys = {.prediction_type = "epsilon"};  // a key of its own is obeyed
  EXPECT_EQ(training_config(file, keys)["prediction_type"], "epsilon");
}

TEST(SchedulerKeys, FlowShiftIsForSamplingAlone) {
  const SchedulerKeys keys{.flow_shift = 7};
  const std::string unipc = R"({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0})",
                    euler = R"({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})";
  EXPECT_EQ(sampling_config(unipc, keys)["flow_shift"], 7);
  EXPECT_EQ(sampling_config(euler, keys)["shift"], 7);
  EXPECT_EQ(training_config(unipc, keys)["flow_shift"], 3);
  EXPECT_EQ(training_config(euler, keys)["shift"], 3);
}

}  // namespace
}  // namespace md
