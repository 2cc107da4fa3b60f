// Schedulers through the device, against what diffusers' schedulers and an independent implementation did with the
// same one-number sample and "network" (tools/golden/schedulers.py).

#include "maxdiffusion/schedulers/scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"

namespace md {
namespace {

using nlohmann::json;

const json& golden() {
  static const json data = json::parse(std::ifstream(MD_SOURCE_DIR "/tests/golden/schedulers.json"));
  return data;
}

HostArray floats(const Dims& dims, const std::vector<float>& values) {
  return HostArray::of<float>({DType::f32, dims}, values);
}

/// One step of the one-number sample as a program. Everything that differs between configurations is in the row, so
/// few programs serve them all; they are kept by their text.
class Programs : public testing::Environment {
 public:
  void TearDown() override { by_text.clear(); }  // before the devices, which were registered earlier
  std::map<std::string, Program> by_text;
};
Programs& kPrograms = *static_cast<Programs*>(testing::AddGlobalTestEnvironment(new Programs));

const Program& step_program(const Scheduler& scheduler, int64_t columns) {
  auto& programs = kPrograms.by_text;
  Graph g(one_device().graph_options());
  Tensor x = g.input("x", {DType::f32, {1, 1}}), t = g.input("t", {DType::f32, {}});
  Tensor row = g.input("row", {DType::f32, {columns}});
  Tensor out = scheduler.scale_input(x, row) * 0.3 + t * (0.1 / 1000) - 0.2;
  g.output("next", scheduler.step(out, x, row, {}, Rng::seed(g, 1))[0]);
  const std::string text = to_stablehlo(g);
  auto it = programs.find(text);
  if (it == programs.end())
    it = programs.emplace(text, compile(one_device(), g, {.jax_cache_dir = "off", .xla_flags = ""}, "step")).first;
  return it->second;
}

/// x after each step, starting at init_noise_sigma: out = 0.3·input + 0.1·t/1000 − 0.2.
std::vector<double> run(const Scheduler& scheduler, int64_t steps) {
  const SampleTable table = scheduler.table(steps);
  const int64_t columns = table.rows.shape().dim(1);
  const Program& program = step_program(scheduler, columns);
  Array x = one_device().put(floats({1, 1}, {static_cast<float>(table.init_noise_sigma)}));
  std::vector<double> values;
  for (size_t i = 0; i < table.timesteps.size(); ++i) {
    const float* row = table.rows.view<float>().data() + static_cast<int64_t>(i) * columns;
    Array t = one_device().put(floats({}, {static_cast<float>(table.timesteps[i])}));
    Array r = one_device().put(floats({columns}, {row, row + columns}));
    x = std::move(program.run({&x, &t, &r})[0]);
    values.push_back(one_device().get(x).to_doubles()[0]);
  }
  return values;
}

void expect_run(const json& config, int64_t steps, const std::vector<double>& expected, double tolerance) {
  const auto found = run(*make_scheduler(config), steps);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], tolerance * (1 + std::abs(expected[i])))
        << config.dump() << " steps " << steps << ", after step " << i;
}

json sd(json more) {
  more.update({{"beta_start", 0.00085}, {"beta_end", 0.012}, {"beta_schedule", "scaled_linear"}});
  return more;
}

TEST(Schedulers, MatchIndependentRuns) {
  const json trailing = {{"_class_name", "EulerDiscreteScheduler"}, {"timestep_spacing", "trailing"}};
  json v = trailing;
  v["prediction_type"] = "v_prediction";
  expect_run(sd(trailing), 5, {12.7169, 10.986, 9.66325, 8.639, 7.45933}, 1e-5);
  expect_run(sd(v), 5, {5.00261, 2.24936, 1.26619, 0.862047, 0.628962}, 1e-5);
  expect_run(sd({{"_class_name", "DDIMScheduler"}, {"timestep_spacing", "trailing"}, {"set_alpha_to_one", false}}), 5,
             {2.45788, 4.42768, 6.32072, 7.52299, 7.53171}, 1e-5);
  expect_run(sd({{"_class_name", "DDIMScheduler"}, {"timestep_spacing", "leading"}, {"steps_offset", 1}}), 5,
             {1.88657, 2.75722, 3.33332, 3.4037, 3.37267}, 1e-5);
}

TEST(Schedulers, MatchDiffusers) {
  int compared = 0;
  for (const auto& r : golden()["runs"]) {
    // diffusers keeps its tables in float32; near zero terminal SNR that costs digits.
    const bool zero_snr = r["config"].value("rescale_betas_zero_snr", false);
    const auto table = make_scheduler(r["config"])->table(r["steps"]);
    const auto timesteps = r["timesteps"].get<std::vector<double>>();
    ASSERT_EQ(table.timesteps.size(), timesteps.size());
    for (size_t i = 0; i < timesteps.size(); ++i) EXPECT_NEAR(table.timesteps[i], timesteps[i], 1e-4);
    EXPECT_NEAR(table.init_noise_sigma, r["init_noise_sigma"].get<double>(),
                1e-5 * r["init_noise_sigma"].get<double>());
    if (r["config"]["_class_name"] == "DDPMScheduler") continue;  // draws noise: below
    expect_run(r["config"], r["steps"], r["values"], zero_snr ? 2e-3 : 2e-5);
    ++compared;
  }
  EXPECT_GE(compared, 28);
}

TEST(Ddpm, MeanAndDeviationOfEachStepMatchDiffusers) {
  int compared = 0;
  for (const auto& r : golden()["runs"]) {
    if (r["config"]["_class_name"] != "DDPMScheduler") continue;
    const auto table = make_scheduler(r["config"])->table(r["steps"]);
    const auto rows = table.rows.view<float>();
    const auto values = r["values"].get<std::vector<double>>(), spread = r["spread"].get<std::vector<double>>();
    const bool clip = r["config"]["clip_sample"];
    double x = 1;
    for (size_t i = 0; i < values.size(); ++i) {
      const float* row = rows.data() + 5 * i;
      const double out = 0.3 * x + 0.1 * table.timesteps[i] / 1000 - 0.2;
      double x0 = row[0] * x + row[1] * out;
      if (clip) x0 = std::min(1.0, std::max(-1.0, x0));
      x = row[2] * x0 + row[3] * x;
      EXPECT_NEAR(x, values[i], 2e-4 * (1 + std::abs(values[i]))) << r["config"].dump() << " after step " << i;
      EXPECT_NEAR(row[4], i + 1 < values.size() ? spread[i] : 0.0, 1e-4) << i;
      x = values[i];
    }
    ++compared;
  }
  EXPECT_EQ(compared, 11);
}

TEST(Ddpm, StepDrawsTheMeanAndDeviationOfItsRow) {
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
  const float* r = table.rows.view<float>().data() + 15;
  const double mean = r[2] * (r[0] * 0.5 - r[1] * 0.25) + r[3] * 0.5;
  double sum = 0, squares = 0;
  for (double v : next) sum += v - mean, squares += (v - mean) * (v - mean);
  EXPECT_NEAR(sum / n, 0, 4 * r[4] / std::sqrt(n));  // four standard errors
  EXPECT_NEAR(std::sqrt(squares / n), r[4], 4 * r[4] / std::sqrt(2.0 * n));
}

TEST(Ddim, EtaAddsNoiseOfItsDeviation) {
  const auto still = make_scheduler(sd({{"_class_name", "DDIMScheduler"}}));
  const auto moved = make_scheduler(sd({{"_class_name", "DDIMScheduler"}, {"eta", 1.0}}));
  EXPECT_EQ(run(*still, 4), run(*still, 4));
  EXPECT_NE(run(*still, 4)[0], run(*moved, 4)[0]);
  EXPECT_GT(moved->table(4).rows.view<float>()[6], 0);
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
      EXPECT_NEAR(epsilon.alphas_cumprod[static_cast<size_t>(t[i])], c["alphas_cumprod"][i].get<double>(), 2e-6);
      EXPECT_NEAR(out[0].to_doubles()[i], c["noised"][i].get<double>(), 1e-5) << t[i];
      EXPECT_EQ(out[1].to_doubles()[i], noise[i]);
      EXPECT_NEAR(out[2].to_doubles()[i], c["velocity"][i].get<double>(), 1e-5) << t[i];
      EXPECT_EQ(out[3].to_doubles()[i], x0[i]);
    }
  }
}

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

}  // namespace
}  // namespace md
