// Noise processes: which one a config selects, and the sampling and weights of flow matching.
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/timestep_sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
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

/// Evaluates f in a new graph.
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
  // u uniform, τ = s·u / (1 + (s − 1)·u): the median of τ is s / (1 + s), and its quartiles are the shifted quartiles
  // of u.
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
  EXPECT_NEAR(high->probability(), above / 20000, 0.013);  // four standard deviations
  EXPECT_NEAR(low->probability() + high->probability(), 1, 1e-12);
  for (double v : t) EXPECT_NE(low->contains(v), high->contains(v)) << v;
  EXPECT_TRUE(high->contains(1000));
  EXPECT_TRUE(low->contains(0));
  t = computed([&](Graph& g) { return high->sample_timesteps(Rng::seed(g, 3), 1000); });
  for (double v : t) EXPECT_TRUE(high->contains(v)) << v;
}

TEST(Process, TrainsTheTimestepsBetweenItsKeys) {
  ProcessKeys keys;
  keys.min_timestep = 200, keys.max_timestep = 700;
  // Wanted: the times in the range of the process without the keys, as often next to each other.
  for (const json& config : {kFlow, json::object()})
    for (const bool biased : {false, true}) {
      ProcessKeys all;
      if (biased && config == kFlow) all.timestep_sampling = keys.timestep_sampling = "logit_normal";
      if (biased && config != kFlow)
        all.timestep_bias = keys.timestep_bias = {{"strategy", "\"later\""}, {"multiplier", "3"}, {"portion", "0.5"}};
      const auto process = make_process(config, keys), whole = make_process(config, all);
      const auto times = [&](const NoiseProcess& p) {
        return computed([&](Graph& g) { return cast(p.sample_timesteps(Rng::seed(g, 3), 40000), DType::f32); });
      };
      const std::vector<double> t = times(*process);
      std::vector<double> wanted = times(*whole);
      std::erase_if(wanted, [](double v) { return v < 200 || v >= 700; });
      EXPECT_TRUE(process->contains(200) && process->contains(699) && !process->contains(199) &&
                  !process->contains(700));
      for (const double v : t) ASSERT_TRUE(v >= 200 && v < 700) << v;
      for (const double bound : {300.0, 500.0, 600.0}) {
        const auto part = [&](const std::vector<double>& of) {
          return static_cast<double>(std::ranges::count_if(of, [&](double v) { return v < bound; })) /
                 static_cast<double>(of.size());
        };
        EXPECT_NEAR(part(t), part(wanted), 0.02) << bound << config << biased;  // four standard deviations
      }
      keys = {.min_timestep = 200, .max_timestep = 700};
    }
  const auto flow = make_process(kFlow, keys);
  EXPECT_TRUE(flow->restricted_to(0, 500)->contains(499) && !flow->restricted_to(0, 500)->contains(199));
  EXPECT_NE(refusal(kFlow, {.min_timestep = 700, .max_timestep = 700}).find("min_timestep is 700 and max_timestep 700"),
            std::string::npos);
  EXPECT_NE(refusal(json::object(), {.max_timestep = 1001}).find("expected 0 <= min_timestep < max_timestep <= 1000"),
            std::string::npos);
  EXPECT_THROW(flow->restricted_to(700, 1000), Error);
}

/// What diffusers computes, and formulas of kohya's sd-scripts (tools/golden/noise_times.py).
const json& golden() {
  static const json all = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/noise_times.json"));
  return all;
}

ProcessKeys sampled_by(const std::string& how, double shift = 1) {
  ProcessKeys keys;
  keys.timestep_sampling = how;
  keys.train_flow_shift = shift;
  return keys;
}

constexpr int64_t kMany = 4000;
/// Times of a process in [0, 1], and the normal and uniform numbers of the same random numbers.
struct Sampled {
  std::vector<double> times, normal, uniform;
};
Sampled sample(const std::shared_ptr<const NoiseProcess>& process) {
  const std::vector<double> all = computed([&](Graph& g) {
    const Rng rng = Rng::seed(g, 5);
    const Shape shape{DType::f32, {kMany}};
    return concatenate({process->sample_timesteps(rng, kMany), random_normal(rng, shape), random_uniform(rng, shape)},
                       0);
  });
  Sampled s{
      {all.begin(), all.begin() + kMany}, {all.begin() + kMany, all.end() - kMany}, {all.end() - kMany, all.end()}};
  for (double& t : s.times) t /= 1000;
  return s;
}

double logistic(double x) { return 1 / (1 + std::exp(-x)); }
double moved(double u, double shift) { return shift * u / (1 + (shift - 1) * u); }

TEST(FlowMatch, TimesChangeWithTheKeysThatADistributionReads) {
  const std::map<std::string, std::function<void(ProcessKeys&)>> changes = {
      {"logit_mean", [](ProcessKeys& k) { k.logit_mean = 0.5; }},
      {"logit_std", [](ProcessKeys& k) { k.logit_std = 0.5; }},
      {"mode_scale", [](ProcessKeys& k) { k.mode_scale = 0.5; }},
      {"sigmoid_scale", [](ProcessKeys& k) { k.sigmoid_scale = 0.5; }},
      {"train_flow_shift", [](ProcessKeys& k) { k.train_flow_shift = 5; }}};
  for (const char* how : {"uniform", "logit_normal", "mode", "cosmap", "sigmoid", "shift", "flux_shift"}) {
    const std::vector<double> times = sample(make_process(kFlow, sampled_by(how))).times;
    for (const auto& [key, change] : changes) {
      ProcessKeys keys = sampled_by(how);
      change(keys);
      EXPECT_EQ(sample(make_process(kFlow, keys)).times != times, timestep_sampling_reads(how, key))
          << how << " " << key;
    }
  }
}

TEST(FlowMatch, TimesAreThoseOfDiffusersScripts) {
  for (const json& of : golden()["logit_normal"]) {
    ProcessKeys keys = sampled_by("logit_normal", 3);
    keys.logit_mean = of.value("logit_mean", 0.0), keys.logit_std = of.value("logit_std", 1.0);
    const auto f = [&](double z) { return logistic(keys.logit_mean + keys.logit_std * z); };
    for (size_t i = 0; i < of["from"].size(); ++i) EXPECT_NEAR(f(of["from"][i]), of["to"][i].get<double>(), 1e-6);
    // Scripts take what comes as a place in timesteps that fall from noise to data.
    const Sampled s = sample(make_process(kFlow, keys));
    for (size_t i = 0; i < kMany; ++i) ASSERT_NEAR(s.times[i], moved(1 - f(-s.normal[i]), 3), 2e-6) << of;
  }
  for (const json& of : golden()["mode"]) {
    ProcessKeys keys = sampled_by("mode");
    keys.mode_scale = of.value("mode_scale", keys.mode_scale);
    const auto f = [&](double u) {
      const double c = std::cos(std::numbers::pi * u / 2);
      return 1 - u - keys.mode_scale * (c * c - 1 + u);
    };
    for (size_t i = 0; i < of["from"].size(); ++i) EXPECT_NEAR(f(of["from"][i]), of["to"][i].get<double>(), 1e-6);
    const Sampled s = sample(make_process(kFlow, keys));
    for (size_t i = 0; i < kMany; ++i) ASSERT_NEAR(s.times[i], 1 - f(s.uniform[i]), 2e-6) << of;
  }
  // Esser et al. 2024, section 3.1: t = 1 − 1/(tan(πu/2) + 1).
  const Sampled s = sample(make_process(kFlow, sampled_by("cosmap")));
  for (size_t i = 0; i < kMany; ++i)
    ASSERT_NEAR(s.times[i], 1 - 1 / (std::tan(std::numbers::pi * s.uniform[i] / 2) + 1), 2e-6);
}

TEST(FlowMatch, TimesAreThoseOfKohyasScripts) {
  ProcessKeys keys = sampled_by("sigmoid", 3);
  keys.sigmoid_scale = 1.5;
  Sampled s = sample(make_process(kFlow, keys));
  for (size_t i = 0; i < kMany; ++i) ASSERT_NEAR(s.times[i], logistic(1.5 * s.normal[i]), 2e-6);
  keys.timestep_sampling = "shift";
  s = sample(make_process(kFlow, keys));
  for (size_t i = 0; i < kMany; ++i) ASSERT_NEAR(s.times[i], moved(logistic(1.5 * s.normal[i]), 3), 2e-6);
  EXPECT_FALSE(make_process(kFlow, keys)->for_tokens(64));
  keys.timestep_sampling = "flux_shift";
  for (const json& of : golden()["dynamic_shift"]) {
    const double u = of["from"][0], y = of["to"][0], shift = y * (1 - u) / (u * (1 - y));
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(moved(of["from"][i], shift), of["to"][i].get<double>(), 1e-9);
    const auto sized = make_process(kFlow, keys)->for_tokens(of["tokens"]);
    s = sample(sized);
    for (size_t i = 0; i < kMany; ++i) ASSERT_NEAR(s.times[i], moved(logistic(1.5 * s.normal[i]), shift), 4e-6) << of;
  }
  json other = kFlow;
  other["base_shift"] = other["max_shift"] = std::log(3.0);
  s = sample(make_process(other, keys)->for_tokens(77));
  for (size_t i = 0; i < kMany; ++i) ASSERT_NEAR(s.times[i], moved(logistic(1.5 * s.normal[i]), 3), 2e-6);
}

TEST(FlowMatch, EveryDistributionIsDividedBetweenExperts) {
  for (const char* how : {"uniform", "logit_normal", "mode", "cosmap", "sigmoid", "shift", "flux_shift"}) {
    ProcessKeys keys = sampled_by(how, 2);
    keys.logit_mean = 0.4;
    const auto sized = [&](const std::shared_ptr<const NoiseProcess>& p) {
      const auto with_tokens = p->for_tokens(1024);
      return with_tokens ? with_tokens : p;
    };
    const auto all = make_process(kFlow, keys);
    const auto low = sized(all->restricted_to(0, 700)), high = sized(all->restricted_to(700, 1000));
    const Sampled s = sample(sized(all));
    const auto above = static_cast<double>(std::ranges::count_if(s.times, [](double t) { return t >= 0.7; })) / kMany;
    EXPECT_NEAR(low->probability() + high->probability(), 1, 1e-12) << how;
    EXPECT_NEAR(high->probability(), above, 0.035) << how;  // more than four deviations
    for (double t : sample(low).times) ASSERT_LE(t, 0.7 + 1e-6) << how;
    // Above the boundary times are distributed as the whole's that are there: compare their means.
    double whole = 0, part = 0;
    for (double t : s.times) whole += t >= 0.7 ? t : 0;
    for (double t : sample(high).times) {
      ASSERT_GE(t, 0.7 - 1e-6) << how;
      part += t;
    }
    EXPECT_NEAR(part / kMany, whole / (above * kMany), 0.01) << how;
  }
}

TEST(FlowMatch, WeightingSchemesAreThoseOfDiffusers) {
  const json& of = golden()["weights"];
  std::vector<float> at;
  for (const json& sigma : of["sigmas"]) at.push_back(1000 * sigma.get<float>());
  for (const char* name : {"sigma_sqrt", "cosmap"}) {
    ProcessKeys keys = sampled_by("uniform");
    keys.weighting_scheme = name;
    const auto process = make_process(kFlow, keys);
    const std::vector<double> w = computed([&](Graph& g) { return process->weight(times(g, at)); });
    for (size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(w[i], of[name][i].get<double>(), 1e-5 * w[i]) << name << i;
    Graph g(one_device().graph_options());
    EXPECT_FALSE(process->unweighted()->weight(times(g, {500})));
    keys.weighting_scheme = "none";
    EXPECT_FALSE(make_process(kFlow, keys)->weight(times(g, {500})));
  }
  // Below the grid's least level the weight grows no further.
  ProcessKeys keys = sampled_by("uniform", 3);
  keys.weighting_scheme = "sigma_sqrt";
  const std::vector<double> w = computed([&](Graph& g) {
    return make_process(kFlow, keys)->weight(times(g, {0, 0.5, 3000.0F / 1002, 6}));
  });
  EXPECT_EQ(w[0], w[1]);
  EXPECT_NEAR(w[1], 1002.0 * 1002 / 9, 1);
  EXPECT_NEAR(w[2], w[1], 1);
  EXPECT_NEAR(w[3], 1e6 / 36, 0.1);
}

TEST(Ddpm, WeightsAreThoseOfKohyasScripts) {
  for (const json& of : golden()["noise_models"]) {
    const json config = {{"beta_schedule", "scaled_linear"},
                         {"beta_start", 0.00085},
                         {"beta_end", 0.012},
                         {"prediction_type", of["prediction_type"]},
                         {"rescale_betas_zero_snr", of["zero"]}};
    const auto expect = [&](const char* name, const ProcessKeys& keys) {
      const std::vector<double> w = computed([&](Graph& g) {
        return make_process(config, keys)
            ->weight(
                constant(g, HostArray::of<int32_t>({DType::s32, {6}}, of["timesteps"].get<std::vector<int32_t>>())));
      });
      // diffusers' ᾱ are products in float32.
      for (size_t i = 0; i < w.size(); ++i)
        EXPECT_NEAR(w[i], of[name][i].get<double>(), 3e-4 * w[i] + 1e-7) << name << of;
    };
    ProcessKeys snr, debiased, scale;
    snr.snr_gamma = 5;
    debiased.debiased_estimation_loss = true;
    scale.scale_v_pred_loss_like_noise_pred = true;
    expect("min_snr_5", snr);
    expect("debiased", debiased);
    if (of["prediction_type"] == "v_prediction") {
      expect("scale_v", scale);
      Graph g(one_device().graph_options());
      const Tensor t = full(g, 3, {DType::s32, {2}});
      EXPECT_FALSE(make_process(config, scale)->unweighted()->weight(t));
    } else {
      EXPECT_NE(refusal(config, scale).find("prediction_type is epsilon; expected v_prediction"), std::string::npos);
    }
  }
  // Weights are factors of each other.
  ProcessKeys both;
  both.snr_gamma = 5, both.debiased_estimation_loss = true;
  const std::vector<double> w = computed([&](Graph& g) {
    const Tensor t = full(g, 500, {DType::s32, {1}});
    ProcessKeys snr = both, debiased = both;
    snr.debiased_estimation_loss = false, debiased.snr_gamma = -1;
    const auto weight = [&](const ProcessKeys& k) { return make_process(json::object(), k)->weight(t); };
    return concatenate({weight(both), weight(snr) * weight(debiased)}, 0);
  });
  EXPECT_NEAR(w[0], w[1], 1e-6 * w[0]);
}

TEST(Process, KeysOfTheOtherKindOfModelAreRefusedByName) {
  for (const auto& [key, set] : std::vector<std::pair<const char*, void (*)(ProcessKeys&)>>{
           {"debiased_estimation_loss", [](ProcessKeys& k) { k.debiased_estimation_loss = true; }},
           {"scale_v_pred_loss_like_noise_pred", [](ProcessKeys& k) { k.scale_v_pred_loss_like_noise_pred = true; }}}) {
    ProcessKeys keys;
    set(keys);
    EXPECT_NE(refusal(kFlow, keys).find(std::string(key) + " is true, but flow matching"), std::string::npos);
  }
  ProcessKeys keys = sampled_by("logit_normal");
  EXPECT_NE(refusal(json::object(), keys)
                .find("timestep_sampling is 'logit_normal', but this model is trained on "
                      "timesteps"),
            std::string::npos);
  keys = {};
  keys.weighting_scheme = "cosmap";
  EXPECT_NE(refusal(json::object(), keys).find("weighting_scheme is 'cosmap', but"), std::string::npos);
  keys.disable_training_weights = true;
  EXPECT_NE(refusal(kFlow, keys).find("and disable_training_weights says"), std::string::npos);
  keys = {};
  keys.debiased_estimation_loss = true;
  EXPECT_NE(refusal({{"rescale_betas_zero_snr", true}}, keys).find("weight of the last timestep is infinite"),
            std::string::npos);
}

// P-5
TEST(FlowMatch, WeightsAreABellOverTheGrid) {
  // Values of the specification for shift 3 (schedulers.md, section 13).
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
    const std::vector<double> y = computed([&, name = how](Graph& g) {
      const auto process = make_process(kFlow, looked_up(name));
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

/// Sigma of each step and the timestep passed to the model: with data 0 and noise 1 the sample equals its sigma.
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
  // The schedulers of Wan and of FLUX.1. UniPC truncates timesteps to integers, as in diffusers; training keeps the
  // fraction.
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
        const bool whole = std::string(name).starts_with("UniPC");  // truncated: 0 to 1 below
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
                                               {"prediction_type", "v_prediction"},
                                               {"eta", 0.0}}));
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
  keys = {.prediction_type = "epsilon"};  // an explicit key takes effect
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
