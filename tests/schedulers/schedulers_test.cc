// Schedulers on the device compared with diffusers' schedulers and an independent implementation on the same small
// sample and fake network (tools/golden/schedulers.py).

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"

namespace md {
namespace {

using nlohmann::json;

const json& golden() {
  static const json data = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/schedulers.json"));
  return data;
}

HostArray floats(const Dims& dims, const std::vector<float>& values) {
  return HostArray::of<float>({DType::f32, dims}, values);
}

/// Compiles one step of a sample [1, n]. Everything that differs between configurations is in the row, so few programs
/// serve all of them; they are cached by their text.
class Programs : public testing::Environment {
 public:
  void TearDown() override { by_text.clear(); }  // before the devices, which were registered earlier
  std::map<std::string, Program> by_text;
};
Programs& kPrograms = *static_cast<Programs*>(testing::AddGlobalTestEnvironment(new Programs));

Tensor network(Tensor input, Tensor t) { return input * 0.3 + t * (0.1 / 1000) - 0.2; }

const Program& step_program(const Scheduler& scheduler, int64_t columns, int64_t n) {
  auto& programs = kPrograms.by_text;
  Graph g(one_device().graph_options());
  Tensor x = g.input("x", {DType::f32, {1, n}}), t = g.input("t", {DType::f32, {}});
  Tensor row = g.input("row", {DType::f32, {columns}});
  std::vector<Tensor> history;
  for (int64_t i = 0; i < scheduler.history(); ++i)
    history.push_back(g.input("history" + std::to_string(i), {DType::f32, {1, n}}));
  Tensor out = network(scheduler.scale_input(x, row), t);
  const auto next = scheduler.step(out, x, row, history, Rng::seed(g, 1));
  for (size_t i = 0; i < next.size(); ++i) g.output("next" + std::to_string(i), next[i]);
  const std::string text = to_stablehlo(g);
  auto it = programs.find(text);
  if (it == programs.end())
    it = programs.emplace(text, compile(one_device(), g, {.jax_cache_dir = "off", .xla_flags = ""}, "step")).first;
  return it->second;
}

/// Stochastic samplers have the noise scale in the last column.
std::vector<float> without_noise(const HostArray& rows) {
  std::vector<float> flat(rows.view<float>().begin(), rows.view<float>().end());
  const auto columns = static_cast<size_t>(rows.shape().dim(1));
  for (size_t i = columns - 1; i < flat.size(); i += columns) flat[i] = 0;
  return flat;
}

/// The sample after each step. It starts at `start` × init_noise_sigma, or, if `begun` > 0, at `start` with step
/// `begun`. `silence`: without noise; otherwise `noise` is the noise value.
std::vector<std::vector<double>> run(const Scheduler& scheduler, int64_t steps, const std::vector<double>& start,
                                     bool silence = false, float noise = 0, int64_t begun = 0) {
  const SampleTable table = scheduler.table(steps, begun);
  const int64_t columns = table.rows.shape().dim(1), n = static_cast<int64_t>(start.size());
  const Program& program = step_program(scheduler, columns, n);
  std::vector<float> first;
  for (double v : start) first.push_back(static_cast<float>(begun > 0 ? v : v * table.init_noise_sigma));
  std::vector<Array> carry;
  carry.push_back(one_device().put(floats({1, n}, first)));
  for (int64_t i = 0; i < scheduler.history(); ++i)
    carry.push_back(one_device().put(floats({1, n}, std::vector<float>(start.size(), 0))));
  const auto all = table.rows.view<float>();
  const std::vector<float> rows = silence ? without_noise(table.rows) : std::vector<float>(all.begin(), all.end());
  std::vector<std::vector<double>> values;
  for (size_t i = 0; i < table.timesteps.size(); ++i) {
    const float* row = rows.data() + static_cast<int64_t>(i) * columns;
    Array t = one_device().put(floats({}, {static_cast<float>(table.timesteps[i])}));
    Array r = one_device().put(floats({columns}, {row, row + columns}));
    std::vector<Array*> in = {&carry[0], &t, &r};
    for (size_t h = 1; h < carry.size(); ++h) in.push_back(&carry[h]);
    carry = program.run(in);
    if (noise != 0) {
      std::vector<float> moved;
      for (double v : one_device().get(carry[0]).to_doubles())
        moved.push_back(static_cast<float>(v) + noise * all[(i + 1) * static_cast<size_t>(columns) - 1]);
      carry[0] = one_device().put(floats({1, n}, moved));
    }
    values.push_back(one_device().get(carry[0]).to_doubles());
  }
  return values;
}

void expect_run(const json& config, int64_t steps, const std::vector<double>& expected, double tolerance) {
  const auto found = run(*make_scheduler(config), steps, {1});
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i][0], expected[i], tolerance * (1 + std::abs(expected[i])))
        << config.dump() << " steps " << steps << ", after step " << i;
}

json sd(json extra) {
  extra.update({{"beta_start", 0.00085}, {"beta_end", 0.012}, {"beta_schedule", "scaled_linear"}});
  return extra;
}

TEST(Schedulers, MatchIndependentRuns) {
  const json trailing = {{"_class_name", "EulerDiscreteScheduler"}, {"timestep_spacing", "trailing"}};
  json v = trailing;
  v["prediction_type"] = "v_prediction";
  expect_run(sd(trailing), 5, {12.7169, 10.986, 9.66325, 8.639, 7.45933}, 1e-5);
  expect_run(sd(v), 5, {5.00261, 2.24936, 1.26619, 0.862047, 0.628962}, 1e-5);
  json ddim = sd({{"_class_name", "DDIMScheduler"}, {"clip_sample", false}});
  ddim.update({{"timestep_spacing", "trailing"}, {"set_alpha_to_one", false}});
  expect_run(ddim, 5, {2.45788, 4.42768, 6.32072, 7.52299, 7.53171}, 1e-5);
  ddim.update({{"timestep_spacing", "leading"}, {"set_alpha_to_one", true}, {"steps_offset", 1}});
  expect_run(ddim, 5, {1.88657, 2.75722, 3.33332, 3.4037, 3.37267}, 1e-5);
  expect_run(sd({{"_class_name", "PNDMScheduler"}, {"skip_prk_steps", true}, {"steps_offset", 1}}), 10,
             {1.49707, 1.45377, 1.98254, 2.53782, 3.08422, 3.57368, 3.96989, 4.24638, 4.38733, 4.29654, 4.28586}, 1e-5);
  json dpm = sd({{"_class_name", "DPMSolverMultistepScheduler"}, {"final_sigmas_type", "sigma_min"}});
  dpm["solver_order"] = 1;
  expect_run(dpm, 8, {1.79024, 2.81292, 3.97627, 5.12862, 6.13654, 6.86734, 7.25003, 7.06847}, 1e-5);
  dpm["solver_order"] = 2;
  expect_run(dpm, 8, {1.79024, 2.74105, 3.78947, 4.81099, 5.69123, 6.31646, 6.62426, 6.46437}, 1e-5);
  dpm["solver_order"] = 3;
  expect_run(dpm, 8, {1.79024, 2.74105, 3.7806, 4.80271, 5.696, 6.34635, 6.66184, 6.50065}, 1e-5);
  // The reference computed its integrals numerically.
  expect_run(sd({{"_class_name", "LMSDiscreteScheduler"}}), 6, {12.7178, 10.815, 9.36702, 8.27569, 7.1268, 7.07052},
             1e-3);
  json wan = {{"_class_name", "UniPCMultistepScheduler"}, {"prediction_type", "flow_prediction"}};
  wan.update({{"use_flow_sigmas", true}, {"flow_shift", 3.0}, {"solver_order", 1}});
  expect_run(wan, 6, {0.987521, 0.972544, 0.953975, 0.930482, 0.900137, 0.85962}, 1e-5);
  wan["solver_order"] = 2;
  expect_run(wan, 6, {0.987521, 0.972577, 0.95455, 0.931978, 0.904465, 0.863459}, 1e-5);
  wan["solver_order"] = 3;
  expect_run(wan, 6, {0.987521, 0.972577, 0.954673, 0.93255, 0.904779, 0.863738}, 1e-5);
}

TEST(Schedulers, MatchDiffusers) {
  std::map<std::string, double> worst;
  for (const auto& r : golden()["runs"]) {
    const std::string what = r["config"].dump() + " steps " + r["steps"].dump();
    const auto scheduler = make_scheduler(r["config"]);
    const auto table = scheduler->table(r["steps"]);
    const auto timesteps = r["timesteps"].get<std::vector<double>>();
    ASSERT_EQ(table.timesteps.size(), timesteps.size()) << what;
    for (size_t i = 0; i < timesteps.size(); ++i) EXPECT_NEAR(table.timesteps[i], timesteps[i], 1e-5) << what;
    EXPECT_NEAR(table.init_noise_sigma, r["init_noise_sigma"].get<double>(),
                1e-7 * r["init_noise_sigma"].get<double>());
    const auto expected = r["values"].get<std::vector<std::vector<double>>>();
    const auto found = run(*scheduler, r["steps"], {1, -0.4}, r.contains("spread"));
    for (size_t i = 0; i < found.size(); ++i)
      for (size_t j = 0; j < 2; ++j) {
        const double error = std::abs(found[i][j] - expected[i][j]) / (1 + std::abs(expected[i][j]));
        // Coefficients of SA-Solver's higher orders are large and cancel.
        EXPECT_LT(error, scheduler->name() == "SASolverScheduler" ? 1e-5 : 2e-6) << what << " after step " << i;
        double& most = worst[scheduler->name()];
        most = std::max(most, error);
      }
    if (!r.contains("spread")) continue;
    // diffusers' DDPM also adds noise after its last step, unless that is timestep 0.
    const auto spread = r["spread"].get<std::vector<double>>();
    const auto rows = table.rows.view<float>();
    const size_t columns = rows.size() / spread.size();
    for (size_t i = 0; i < spread.size(); ++i) {
      const bool silent = i + 1 == spread.size() && scheduler->name() == "DDPMScheduler";
      EXPECT_NEAR(rows[(i + 1) * columns - 1], silent ? 0 : spread[i], 1e-6 * (1 + spread[i])) << what << " step " << i;
    }
  }
  EXPECT_EQ(worst.size(), scheduler_names().size());
  for (const auto& [name, error] : worst) std::cout << name << " is at most " << error << " away\n";
}

TEST(Schedulers, BeginWithALaterStepAsDiffusersDoes) {
  std::set<std::string> compared, stochastic;
  for (const auto& r : golden()["begun"])
    if (r["random"]) stochastic.insert(r["config"]["_class_name"]);
  for (const auto& r : golden()["begun"]) {
    const int64_t first = r["first"];
    const std::string what = r["config"].dump() + " from step " + std::to_string(first);
    const auto scheduler = make_scheduler(r["config"]);
    const SampleTable table = scheduler->table(r["steps"], first);
    const auto timesteps = r["timesteps"].get<std::vector<double>>();
    const auto levels = r["levels"].get<std::vector<std::vector<double>>>();
    ASSERT_EQ(table.timesteps.size(), timesteps.size()) << what;
    ASSERT_EQ(table.levels.size(), timesteps.size()) << what;
    const bool between = scheduler->name().starts_with("KDPM2") || scheduler->name() == "DPMSolverSDEScheduler";
    for (size_t i = 0; i < timesteps.size(); ++i) {
      EXPECT_NEAR(table.timesteps[i], timesteps[i], 1e-5) << what;
      if (between && i % 2 == 1) continue;  // diffusers uses the sigma of the step's end
      EXPECT_NEAR(table.levels[i].signal, levels[i][0], 1e-6) << what << " row " << i;
      EXPECT_NEAR(table.levels[i].noise, levels[i][1], 1e-6 * (1 + levels[i][1])) << what << " row " << i;
    }
    const auto expected = r["values"].get<std::vector<std::vector<double>>>();
    const auto found = run(*scheduler, r["steps"], {1, -0.4}, stochastic.contains(scheduler->name()), 0, first);
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (size_t i = 0; i < found.size(); ++i)
      for (size_t j = 0; j < 2; ++j)
        EXPECT_NEAR(found[i][j], expected[i][j], 1e-5 * (1 + std::abs(expected[i][j]))) << what << " after step " << i;
    compared.insert(scheduler->name());
  }
  // diffusers has no DPM++ 2S ancestral, no DPM++ 3M SDE and no Restart.
  EXPECT_EQ(compared.size() + 3, scheduler_names().size());
}

// SA-Solver's corrector adds the noise of its predictor; DPM++ SDE's whole step that of its half step.
TEST(Schedulers, ACallAddsTheNoiseOfTheCallBeforeAgain) {
  std::set<std::string> compared;
  for (const auto& r : golden()["noisy"]) {
    compared.insert(r["config"]["_class_name"]);
    const auto expected = r["values"].get<std::vector<std::vector<double>>>();
    const auto found = run(*make_scheduler(r["config"]), r["steps"], {1, -0.4}, true, 1);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i)
      for (size_t j = 0; j < 2; ++j)
        EXPECT_NEAR(found[i][j], expected[i][j], 1e-5 * (1 + std::abs(expected[i][j]))) << r["config"].dump() << i;
  }
  EXPECT_EQ(compared, (std::set<std::string>{"DPMSolverSDEScheduler", "SASolverScheduler"}));
}

TEST(Schedulers, TimestepsOfTrainingAreKnownWhereTheModelGetsLogSigma) {
  json config = sd({{"_class_name", "EulerDiscreteScheduler"}, {"prediction_type", "v_prediction"}});
  const std::vector<double> training = make_scheduler(config)->table(6).timesteps;
  config["timestep_type"] = "continuous";
  for (const int64_t first : {0, 2}) {
    const SampleTable table = make_scheduler(config)->table(6, first);
    EXPECT_EQ(table.training_timesteps, std::vector<double>(training.begin() + first, training.end()));
    for (size_t i = 0; i < table.timesteps.size(); ++i)
      EXPECT_NEAR(table.timesteps[i], 0.25 * std::log(table.levels[i].noise), 1e-12);
    EXPECT_LT(table.timesteps.back(), 0);
  }
}

TEST(Schedulers, TimestepsOfLogSigmaThatASamplerCannotGiveAreWarnedOf) {
  auto warnings = [](const char* name, const char* prediction) {
    testing::internal::CaptureStderr();
    make_scheduler(sd({{"_class_name", name}, {"prediction_type", prediction}, {"timestep_type", "continuous"}}));
    return testing::internal::GetCapturedStderr();
  };
  for (const char* name : {"LMSDiscreteScheduler", "DDIMScheduler", "DPMSolverSDEScheduler"}) {
    EXPECT_NE(
        warnings(name, "v_prediction").find("timestep_type is continuous, which " + std::string(name) + " ignores"),
        std::string::npos);
    EXPECT_EQ(warnings(name, "epsilon"), "");
  }
  EXPECT_EQ(warnings("EulerDiscreteScheduler", "v_prediction"), "");
}

TEST(Schedulers, OneGraphHoldsTheLoop) {
  int compared = 0;
  for (const auto& r : golden()["runs"]) {
    const auto& c = r["config"];
    const auto scheduler = make_scheduler(c);
    if (r.contains("spread") || r["steps"] != 20 || scheduler->history() == 0) continue;
    const SampleTable table = scheduler->table(r["steps"]);
    Graph g(one_device().graph_options());
    Tensor start = g.input("x", {DType::f32, {1, 2}});
    Tensor rows = constant(g, table.rows);
    const auto calls = static_cast<int64_t>(table.timesteps.size());
    Tensor t = constant(g, floats({calls}, {table.timesteps.begin(), table.timesteps.end()}));
    std::vector<Tensor> carry = {start};
    for (int64_t i = 0; i < scheduler->history(); ++i) carry.push_back(zeros_like(start));
    auto out = scan(calls, carry, [&](ScanStep& step, const std::vector<Tensor>& at) -> ScanResult {
      Tensor row = step.slice(rows);
      Tensor prediction = network(scheduler->scale_input(at[0], row), step.slice(t));
      return {scheduler->step(prediction, at[0], row, {at.begin() + 1, at.end()}, Rng::seed(step.body(), 1)), {}};
    });
    g.output("x", out.carry[0]);
    const auto top = static_cast<float>(table.init_noise_sigma);
    const auto found = evaluate(one_device(), g, {floats({1, 2}, {top, -0.4f * top})})[0].to_doubles();
    const auto expected = r["values"].back().get<std::vector<double>>();
    for (size_t j = 0; j < 2; ++j) EXPECT_NEAR(found[j], expected[j], 2e-6 * (1 + std::abs(expected[j]))) << c.dump();
    ++compared;
  }
  EXPECT_GE(compared, 5);
}

TEST(Ddpm, StepHasTheMeanAndDeviationOfItsRow) {
  const auto scheduler = make_scheduler(sd({{"_class_name", "DDPMScheduler"}, {"clip_sample", false}}));
  const SampleTable table = scheduler->table(10);
  const int64_t n = 1 << 16;
  Graph g(one_device().graph_options());
  Tensor x = g.input("x", {DType::f32, {n}}), out = g.input("out", {DType::f32, {n}});
  Tensor row = reshape(slice_axis(constant(g, table.rows), 0, 3, 4), {-1});
  g.output("next", scheduler->step(out, x, row, {}, Rng::seed(g, 7))[0]);
  const std::vector<float> xs(n, 0.5f), outs(n, -0.25f);
  const auto next =
      evaluate(one_device(), g,
               {HostArray::of<float>({DType::f32, {n}}, xs), HostArray::of<float>({DType::f32, {n}}, outs)})[0]
          .to_doubles();
  const int64_t columns = table.rows.shape().dim(1);
  const float* r = table.rows.view<float>().data() + 3 * columns;  // scales of input, sample, output, noise
  const double mean = r[1] * 0.5 - r[2] * 0.25, deviation = r[columns - 1];
  double sum = 0, squares = 0;
  for (double v : next) sum += v - mean, squares += (v - mean) * (v - mean);
  EXPECT_NEAR(sum / n, 0, 4 * deviation / std::sqrt(n));  // four standard errors
  EXPECT_NEAR(std::sqrt(squares / n), deviation, 4 * deviation / std::sqrt(2.0 * n));
}

TEST(Ddim, EtaAddsNoise) {
  const auto still = make_scheduler(sd({{"_class_name", "DDIMScheduler"}}));
  const auto moved = make_scheduler(sd({{"_class_name", "DDIMScheduler"}, {"eta", 1.0}}));
  EXPECT_EQ(run(*still, 4, {1}), run(*still, 4, {1}));
  EXPECT_NE(run(*still, 4, {1})[0], run(*moved, 4, {1})[0]);
}

TEST(Noise, NoisingTargetsAndTablesMatchDiffusers) {
  for (const auto& c : golden()["tables"]) {
    json config = c["config"];
    const auto epsilon = NoiseSchedule::from_json(config);
    config["prediction_type"] = "v_prediction";
    const auto velocity = NoiseSchedule::from_json(config);
    config["prediction_type"] = "sample";
    const auto sample = NoiseSchedule::from_json(config);
    const auto t = c["timesteps"].get<std::vector<int32_t>>();
    const auto x0 = c["x0"].get<std::vector<float>>(), noise = c["noise"].get<std::vector<float>>();
    const auto n = static_cast<int64_t>(t.size());
    Graph g(one_device().graph_options());
    Tensor tx = g.input("x0", {DType::f32, {n, 1}}), tn = g.input("noise", {DType::f32, {n, 1}});
    Tensor tt = g.input("t", {DType::s32, {n}});
    g.output("noised", add_noise(epsilon, tx, tn, tt));
    g.output("epsilon", training_target(epsilon, tx, tn, tt));
    g.output("velocity", training_target(velocity, tx, tn, tt));
    g.output("sample", training_target(sample, tx, tn, tt));
    const auto out =
        evaluate(one_device(), g,
                 {HostArray::of<float>({DType::f32, {n, 1}}, x0), HostArray::of<float>({DType::f32, {n, 1}}, noise),
                  HostArray::of<int32_t>({DType::s32, {n}}, t)});
    for (size_t i = 0; i < t.size(); ++i) {
      EXPECT_NEAR(epsilon.alphas_cumprod[static_cast<size_t>(t[i])], c["alphas_cumprod"][i].get<double>(), 1e-9);
      EXPECT_NEAR(out[0].to_doubles()[i], c["noised"][i].get<double>(), 1e-6) << t[i];
      EXPECT_EQ(out[1].to_doubles()[i], noise[i]);
      EXPECT_NEAR(out[2].to_doubles()[i], c["velocity"][i].get<double>(), 1e-6) << t[i];
      EXPECT_EQ(out[3].to_doubles()[i], x0[i]);
    }
  }
}

// S4-37
TEST(Noise, MinSnrWeights) {
  for (const char* type : {"epsilon", "v_prediction", "sample"}) {
    const auto n = NoiseSchedule::from_json(sd({{"prediction_type", type}}));
    Graph g(one_device().graph_options());
    Tensor t = g.input("t", {DType::s32, {3}});
    g.output("weight", snr_weight(n, t, 5.0));
    g.output("off", snr_weight(n, t, 0));
    const std::vector<int32_t> ts = {0, 500, 999};
    const auto out = evaluate(one_device(), g, {HostArray::of<int32_t>({DType::s32, {3}}, ts)});
    for (size_t i = 0; i < 3; ++i) {
      const double a = n.alphas_cumprod[static_cast<size_t>(ts[i])], snr = a / (1 - a), capped = std::min(snr, 5.0);
      const double expected = std::string(type) == "epsilon"        ? capped / snr
                              : std::string(type) == "v_prediction" ? capped / (snr + 1)
                                                                    : capped;
      EXPECT_NEAR(out[0].to_doubles()[i], expected, 1e-6 * expected) << type;
      EXPECT_EQ(out[1].to_doubles()[i], 1);
    }
  }
}

TEST(Noise, MinSnrWeightsNearZeroAreWarnedOf) {
  auto message = [](const char* type, bool zero, double gamma) {
    testing::internal::CaptureStderr();
    make_process(sd({{"prediction_type", type}, {"rescale_betas_zero_snr", zero}}), {.snr_gamma = gamma});
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_NE(message("v_prediction", true, 5).find("snr_gamma=5 and rescale_betas_zero_snr"), std::string::npos);
  EXPECT_EQ(message("v_prediction", true, -1), "");
  EXPECT_EQ(message("v_prediction", false, 5), "");
  EXPECT_EQ(message("epsilon", true, 5), "");
}

TEST(Noise, TimestepsCoverTheScheduleUniformly) {
  const auto n = NoiseSchedule::from_json(json::object());
  Graph g(one_device().graph_options());
  g.input("unused", {DType::f32, {}});
  g.output("t", sample_timesteps(n, Rng::seed(g, 3).for_("timestep"), 20000));
  const float zero = 0;
  const auto t = evaluate(one_device(), g, {HostArray::of<float>({DType::f32, {}}, {&zero, 1})})[0].to_doubles();
  std::vector<int> tenths(10, 0);
  for (double v : t) {
    ASSERT_TRUE(v >= 0 && v < 1000);
    ++tenths[static_cast<size_t>(v / 100)];
  }
  for (int count : tenths) EXPECT_NEAR(count, 2000, 5 * std::sqrt(2000 * 0.9));
}

// S4-38, S4-39
TEST(Noise, TimestepsFollowTheirBias) {
  const auto n = NoiseSchedule::from_json(json::object());
  Graph g(one_device().graph_options());
  g.input("unused", {DType::f32, {}});
  g.output("t", sample_timesteps(n, Rng::seed(g, 3).for_("timestep"), 20000,
                                 {.strategy = "range", .multiplier = 3, .begin = 500, .end = 1000}));
  const float zero = 0;
  const auto t = evaluate(one_device(), g, {HostArray::of<float>({DType::f32, {}}, {&zero, 1})})[0].to_doubles();
  const auto upper = std::count_if(t.begin(), t.end(), [](double v) { return v >= 500; });
  EXPECT_NEAR(static_cast<double>(upper), 15000, 5 * std::sqrt(20000 * 0.75 * 0.25));
}

}  // namespace
}  // namespace md
