// Host arithmetic of schedules and samplers. Expected values are from an independent implementation in float32;
// tests/schedulers runs them on a device.

#include "maxdiffusion/schedulers/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"

namespace md {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const json kSd = {{"beta_start", 0.00085}, {"beta_end", 0.012}, {"beta_schedule", "scaled_linear"}};

json with(json config, const json& extra) {
  config.update(extra);
  return config;
}
json euler(const json& extra = json::object()) {
  return with(kSd, with({{"_class_name", "EulerDiscreteScheduler"}}, extra));
}

void expect_close(double found, double expected, double tolerance = 1e-5) {
  EXPECT_NEAR(found, expected, tolerance * std::max(1e-30, std::abs(expected)));
}

template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(NoiseSchedule, ScaledLinearMatchesTheRecordedTable) {
  const auto n = NoiseSchedule::from_json(kSd);
  ASSERT_EQ(n.alphas_cumprod.size(), 1000u);
  for (auto [i, a] : {std::pair{0, 0.99915},
                      {1, 0.998296},
                      {249, 0.675432},
                      {499, 0.277669},
                      {749, 0.0566234},
                      {998, 0.0047167},
                      {999, 0.0046601}})
    expect_close(n.alphas_cumprod[static_cast<size_t>(i)], a);
}

TEST(NoiseSchedule, LinearIsTheDefault) {
  const auto n = NoiseSchedule::from_json(json::object());
  for (auto [i, a] : {std::pair{0, 0.9999}, {499, 0.0785872}, {999, 4.03583e-05}})
    expect_close(n.alphas_cumprod[static_cast<size_t>(i)], a);
}

TEST(NoiseSchedule, SquaredCosineMatchesTheRecordedBetas) {
  const auto n = NoiseSchedule::from_json({{"beta_schedule", "squaredcos_cap_v2"}});
  for (auto [i, b] : {std::pair{0, 4.12842e-05}, {499, 0.00314589}, {998, 0.749999}, {999, 0.999}})
    expect_close(n.betas[static_cast<size_t>(i)], b);
}

TEST(NoiseSchedule, ZeroTerminalSnrEndsInPureNoise) {
  for (const char* key : {"rescale_betas_zero_snr", "rescale_zero_terminal_snr"}) {
    const auto n = NoiseSchedule::from_json(with(kSd, {{key, true}}));
    expect_close(n.alphas_cumprod[0], 0.99915);
    expect_close(n.alphas_cumprod[499], 0.242359);
    expect_close(n.alphas_cumprod[998], 1.96796e-07, 1e-4);  // the recorded value lost digits to float32
    EXPECT_EQ(n.alphas_cumprod[999], 0);
    EXPECT_EQ(n.betas[999], 1);
  }
}

TEST(NoiseSchedule, TrainedBetasWin) {
  const auto n = NoiseSchedule::from_json(
      {{"trained_betas", {0.1, 0.2}}, {"num_train_timesteps", 2}, {"beta_schedule", "linear"}});
  EXPECT_DOUBLE_EQ(n.alphas_cumprod[1], 0.9 * 0.8);
  EXPECT_EQ(NoiseSchedule::from_json({{"trained_betas", nullptr}}).betas.size(), 1000u);
}

TEST(NoiseSchedule, BadMembersAreNamed) {
  auto load = [](const json& c) { return refusal([&] { NoiseSchedule::from_json(c); }); };
  EXPECT_THAT(load({{"beta_schedule", "cubic"}}),
              HasSubstr("beta_schedule is 'cubic'; expected one of: linear, scaled_linear"));
  EXPECT_THAT(load({{"prediction_type", "flow"}}), HasSubstr("prediction_type is 'flow'; expected one of: epsilon"));
  EXPECT_THAT(load({{"beta_start", "small"}}), HasSubstr("beta_start is \"small\"; expected a number"));
  EXPECT_THAT(load({{"trained_betas", {0.1}}}), HasSubstr("trained_betas has 1 entries, num_train_timesteps is 1000"));
  EXPECT_THAT(load({{"num_train_timesteps", 0}}), HasSubstr("num_train_timesteps is 0"));
  EXPECT_THAT(load({{"beta_end", 2.0}}), HasSubstr("is 1.0"));
  EXPECT_THAT(load(json::array()), HasSubstr("expected a JSON object"));
}

struct EulerCase {
  const char* spacing;
  int64_t steps;
  std::vector<double> timesteps, sigmas;  // the first ones
  double init;
};

TEST(Euler, SpacingsGiveTheRecordedTimestepsAndSigmas) {
  const EulerCase cases[] = {
      {"trailing", 4, {999, 749, 499, 249}, {14.6146, 4.08173, 1.61289, 0.693205}, 14.6146},
      {"trailing", 20, {999, 949}, {14.6146, 10.9042, 8.30281, 6.44296}, 14.6146},
      {"leading", 4, {751, 501, 251, 1}, {4.1167, 1.62369, 0.698399, 0.0413145}, 4.23641},
      {"leading", 20, {951, 901}, {11.0283, 8.39069, 6.5064, 5.13443}, 11.0736},
      {"linspace", 4, {999, 666, 333, 0}, {14.6146, 2.91831, 0.932358, 0.0291675}, 14.6146},
      {"linspace", 20, {999, 946.421, 893.842}, {14.6146, 10.7469, 8.08154, 6.20495}, 14.6146},
  };
  for (const auto& c : cases) {
    const auto table = make_scheduler(euler({{"timestep_spacing", c.spacing}, {"steps_offset", 1}}))->table(c.steps);
    ASSERT_EQ(static_cast<int64_t>(table.timesteps.size()), c.steps);
    for (size_t i = 0; i < c.timesteps.size(); ++i) expect_close(table.timesteps[i], c.timesteps[i], 1e-6);
    expect_close(table.init_noise_sigma, c.init);
    const auto rows = table.rows.view<float>();  // 1/√(σ² + 1), then the coefficients of sample and output
    for (size_t i = 0; i < c.sigmas.size(); ++i) {
      const double scale = rows[3 * i];
      expect_close(std::sqrt(1 / (scale * scale) - 1), c.sigmas[i], c.sigmas[i] < 0.1 ? 1e-3 : 2e-5);
    }
    for (size_t i = 0; i + 1 < c.sigmas.size(); ++i)  // for epsilon the second coefficient is σ' − σ
      EXPECT_NEAR(rows[3 * i + 2], c.sigmas[i + 1] - c.sigmas[i], 2e-4);
  }
}

TEST(Euler, OneStepStartsAtPureNoise) {
  for (const char* spacing : {"linspace", "trailing"}) {
    const auto table = make_scheduler(euler({{"timestep_spacing", spacing}}))->table(1);
    EXPECT_EQ(table.timesteps, std::vector<double>{999});
    EXPECT_NEAR(table.rows.view<float>()[2], -14.6146, 1e-4);  // down to σ = 0
  }
}

TEST(Euler, AsManyStepsAsTimestepsVisitsEach) {
  for (const char* spacing : {"linspace", "trailing", "leading"}) {
    const auto table = make_scheduler(euler({{"timestep_spacing", spacing}, {"steps_offset", 0}}))->table(1000);
    for (size_t i = 0; i < 1000; ++i) EXPECT_NEAR(table.timesteps[i], 999.0 - static_cast<double>(i), 1e-9);
  }
}

TEST(Euler, ZeroTerminalSnrStaysFinite) {
  const auto table =
      make_scheduler(euler({{"timestep_spacing", "trailing"}, {"rescale_betas_zero_snr", true}}))->table(4);
  EXPECT_NEAR(table.init_noise_sigma, std::sqrt(0x1p24 - 1), 1);
  for (float v : table.rows.view<float>()) EXPECT_TRUE(std::isfinite(v));
}

TEST(Schedulers, StepsOutsideTheScheduleAreRefused) {
  for (const auto& name : scheduler_names()) {
    const auto s = make_scheduler(with(kSd, {{"_class_name", name}}));
    EXPECT_EQ(s->name(), name);
    const bool distilled = name == "LCMScheduler" || name == "TCDScheduler";
    EXPECT_THAT(refusal([&] { s->table(0); }),
                HasSubstr(distilled ? "num_inference_steps is 0; expected 1 to original_inference_steps = 50"
                                    : "num_inference_steps is 0; expected 1 to num_train_timesteps = 1000"));
    EXPECT_THAT(refusal([&] { s->table(1001); }), HasSubstr("num_inference_steps is 1001"));
  }
}

// S4-44
TEST(Schedulers, NamesAreKnownWithAndWithoutFlax) {
  EXPECT_EQ(make_scheduler(euler({{"_class_name", "FlaxEulerDiscreteScheduler"}}))->name(), "EulerDiscreteScheduler");
  const auto what = refusal([] { make_scheduler({{"_class_name", "IPNDMScheduler"}}); });
  EXPECT_THAT(what, HasSubstr("the sampler IPNDMScheduler is not supported; expected one of: "
                              "DDPMScheduler, "));
  EXPECT_THAT(refusal([] {
                make_scheduler({{"_class_name", "HeunDiscretScheduler"}});
              }),
              HasSubstr("expected one of: HeunDiscreteScheduler, DDPMScheduler, "));
  EXPECT_THAT(refusal([] {
                make_scheduler({{"_class_name", "LMSDiscretScheduler"}});
              }),
              HasSubstr("expected one of: LMSDiscreteScheduler, DDPMScheduler, "));
  EXPECT_THAT(refusal([] { make_scheduler(json::object()); }), HasSubstr("_class_name is missing"));
}

// The published files.
struct Published {
  const char *model, *config;
  int64_t steps;
  std::vector<double> timesteps;  // the first ones
};

const Published kPublished[] = {
    {"stable-diffusion-v1-5",
     R"({
  "_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
  "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": false, "skip_prk_steps": true,
  "steps_offset": 1, "trained_betas": null, "clip_sample": false})",
     50,
     {981, 961, 961, 941, 921}},
    {"stable-diffusion-2-1",
     R"({
  "_class_name": "DDIMScheduler", "_diffusers_version": "0.8.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
  "beta_start": 0.00085, "clip_sample": false, "num_train_timesteps": 1000, "prediction_type": "v_prediction",
  "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1, "trained_betas": null})",
     50,
     {981, 961, 941}},
    {"stable-diffusion-2-1-base",
     R"({
  "_class_name": "PNDMScheduler", "_diffusers_version": "0.10.0.dev0", "beta_end": 0.012,
  "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false, "num_train_timesteps": 1000,
  "prediction_type": "epsilon", "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1,
  "trained_betas": null})",
     20,
     {951, 901, 901, 851}},
    {"stable-diffusion-xl-base-1.0",
     R"({
  "_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.19.0.dev0", "beta_end": 0.012,
  "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false, "interpolation_type": "linear",
  "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": false,
  "skip_prk_steps": true, "steps_offset": 1, "timestep_spacing": "leading", "trained_betas": null,
  "use_karras_sigmas": false})",
     50,
     {981, 961, 941}},
    {"SDXL-Lightning",
     R"({
  "_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.26.3", "beta_end": 0.012,
  "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false, "interpolation_type": "linear",
  "num_train_timesteps": 1000, "prediction_type": "epsilon", "rescale_betas_zero_snr": false, "sample_max_value": 1.0,
  "set_alpha_to_one": false, "sigma_max": null, "sigma_min": null, "skip_prk_steps": true, "steps_offset": 1,
  "timestep_spacing": "trailing", "timestep_type": "discrete", "trained_betas": null, "use_karras_sigmas": false})",
     4,
     {999, 749, 499, 249}},
    {"Hyper-SD",
     R"({
  "_class_name": "DDIMScheduler", "_diffusers_version": "0.27.2", "beta_end": 0.012, "beta_schedule": "scaled_linear",
  "beta_start": 0.00085, "clip_sample": false, "clip_sample_range": 1.0, "dynamic_thresholding_ratio": 0.995,
  "interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon",
  "rescale_betas_zero_snr": false, "sample_max_value": 1.0, "set_alpha_to_one": false, "skip_prk_steps": true,
  "steps_offset": 1, "thresholding": false, "timestep_spacing": "trailing", "trained_betas": null,
  "use_karras_sigmas": false})",
     8,
     {999, 874, 749, 624}},
    {"stable-video-diffusion-img2vid",
     R"({
  "_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.24.0.dev0", "beta_end": 0.012,
  "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false, "interpolation_type": "linear",
  "num_train_timesteps": 1000, "prediction_type": "v_prediction", "set_alpha_to_one": false, "sigma_max": 700.0,
  "sigma_min": 0.002, "skip_prk_steps": true, "steps_offset": 1, "timestep_spacing": "leading",
  "timestep_type": "continuous", "trained_betas": null, "use_karras_sigmas": true})",
     25,
     {1.63777}},
    {"PixArt-alpha",
     R"({
  "_class_name": "DPMSolverMultistepScheduler", "_diffusers_version": "0.22.0.dev0", "algorithm_type": "dpmsolver++",
  "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001, "dynamic_thresholding_ratio": 0.995,
  "euler_at_final": false, "lambda_min_clipped": -Infinity, "lower_order_final": true, "num_train_timesteps": 1000,
  "prediction_type": "epsilon", "sample_max_value": 1.0, "solver_order": 2, "solver_type": "midpoint",
  "steps_offset": 0, "thresholding": false, "timestep_spacing": "linspace", "trained_betas": null,
  "use_karras_sigmas": false, "use_lu_lambdas": false, "variance_type": null})",
     20,
     {999, 949, 899}},
    {"Sana",
     R"({
  "_class_name": "DPMSolverMultistepScheduler", "_diffusers_version": "0.32.0.dev0", "algorithm_type": "dpmsolver++",
  "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001, "dynamic_thresholding_ratio": 0.995,
  "euler_at_final": false, "final_sigmas_type": "zero", "flow_shift": 3.0, "lambda_min_clipped": -Infinity,
  "lower_order_final": true, "num_train_timesteps": 1000, "prediction_type": "flow_prediction",
  "rescale_betas_zero_snr": false, "sample_max_value": 1.0, "solver_order": 2, "solver_type": "midpoint",
  "steps_offset": 0, "thresholding": false, "timestep_spacing": "linspace", "trained_betas": null,
  "use_beta_sigmas": false, "use_exponential_sigmas": false, "use_flow_sigmas": true, "use_karras_sigmas": false,
  "use_lu_lambdas": false, "variance_type": null})",
     9,
     {999, 959, 912, 856, 789, 705, 599, 461, 272}},
    {"Wan2.1-T2V",
     R"({
  "_class_name": "UniPCMultistepScheduler", "_diffusers_version": "0.33.0.dev0", "beta_end": 0.02,
  "beta_schedule": "linear", "beta_start": 0.0001, "disable_corrector": [], "dynamic_thresholding_ratio": 0.995,
  "final_sigmas_type": "zero", "flow_shift": 5.0, "lower_order_final": true, "num_train_timesteps": 1000,
  "predict_x0": true, "prediction_type": "flow_prediction", "rescale_betas_zero_snr": false, "sample_max_value": 1.0,
  "solver_order": 2, "solver_p": null, "solver_type": "bh2", "steps_offset": 0, "thresholding": false,
  "timestep_spacing": "linspace", "trained_betas": null, "use_beta_sigmas": false, "use_exponential_sigmas": false,
  "use_flow_sigmas": true, "use_karras_sigmas": false})",
     50,
     {999, 995, 991, 987, 982, 978, 973, 968, 963, 957, 952, 946, 940, 934, 927, 921, 914,
      906, 899, 890, 882, 873, 864, 854, 844, 833, 822, 810, 797, 783, 769, 754, 738, 720,
      702, 682, 661, 638, 613, 586, 556, 524, 489, 450, 407, 359, 305, 244, 175, 96}},
};

TEST(Schedulers, PublishedFilesAreTakenAsTheyAre) {
  for (const auto& p : kPublished) {
    testing::internal::CaptureStderr();
    const auto scheduler = make_scheduler(parse_scheduler_config(p.config));
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << p.model;
    const auto table = scheduler->table(p.steps);
    ASSERT_GE(table.timesteps.size(), p.timesteps.size()) << p.model;
    for (size_t i = 0; i < p.timesteps.size(); ++i) EXPECT_NEAR(table.timesteps[i], p.timesteps[i], 1e-5) << p.model;
  }
}

TEST(UniPc, ShiftedFlowTimestepsMatchTheRecordedOnes) {
  auto timesteps = [](double shift, int64_t steps) {
    json c = parse_scheduler_config(std::end(kPublished)[-1].config);
    c["flow_shift"] = shift;
    return make_scheduler(c)->table(steps).timesteps;
  };
  EXPECT_EQ(timesteps(3, 6), (std::vector<double>{999, 937, 857, 750, 600, 376}));
  EXPECT_EQ(timesteps(5, 10), (std::vector<double>{999, 978, 952, 921, 882, 833, 769, 682, 556, 359}));
  EXPECT_EQ(timesteps(12, 2), (std::vector<double>{999, 923}));
  EXPECT_EQ(timesteps(12, 40),
            (std::vector<double>{999, 997, 995, 993, 990, 988, 985, 982, 979, 976, 973, 969, 965, 961,
                                 957, 952, 947, 942, 936, 930, 923, 915, 907, 898, 889, 878, 866, 852,
                                 837, 820, 800, 777, 750, 719, 680, 633, 573, 496, 391, 242}));
}

TEST(Schedulers, EveryStepCountAndSpacingIsFinite) {
  for (const auto& name : scheduler_names())
    for (const char* spacing : {"linspace", "leading", "trailing"})
      for (const char* type : {"epsilon", "v_prediction"})
        for (bool zero_snr : {false, true}) {
          const auto s = make_scheduler(with(kSd, {{"_class_name", name},
                                                   {"timestep_spacing", spacing},
                                                   {"prediction_type", type},
                                                   {"rescale_betas_zero_snr", zero_snr},
                                                   {"solver_order", 3},
                                                   {"solver_type", "bh1"},
                                                   {"original_inference_steps", 1000},
                                                   {"steps_offset", 1}}));
          for (int64_t steps : {4, 5, 15, 499, 998}) {
            const auto table = s->table(steps);
            for (float v : table.rows.view<float>())
              ASSERT_TRUE(std::isfinite(v)) << name << " " << spacing << " " << type << " " << steps;
          }
        }
}

TEST(Schedulers, SigmaSchedulesAreRefusedWhereTheyMeanNothing) {
  auto refused = [](const char* name, const json& extra) {
    return refusal([&] { make_scheduler(with(kSd, with({{"_class_name", name}}, extra)))->table(4); });
  };
  EXPECT_THAT(refused("EulerDiscreteScheduler", {{"sigma_schedule", "karas"}}),
              HasSubstr("sigma_schedule is 'karas'; expected one of: training, karras, exponential, beta"));
  EXPECT_THAT(refused("EulerDiscreteScheduler", {{"sigma_schedule", "beta"}, {"use_karras_sigmas", true}}),
              HasSubstr("use_karras_sigmas is true with beta levels"));
  for (const char* name : {"DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LCMScheduler", "TCDScheduler"})
    EXPECT_THAT(refused(name, {{"sigma_schedule", "simple"}}),
                HasSubstr("sigma_schedule is 'simple', but " + std::string(name) + " steps over timesteps"));
  EXPECT_THAT(refused("FlowMatchHeunDiscreteScheduler", {{"sigma_schedule", "ays_sdxl"}}),
              HasSubstr("sigma_schedule is 'ays_sdxl', levels of a model that predicts noise"));
  EXPECT_THAT(refused("TCDScheduler", {{"eta", 1.5}}), HasSubstr("eta is 1.5; expected 0 to 1"));
  EXPECT_THAT(refused("LCMScheduler", {{"original_inference_steps", 3}}),
              HasSubstr("num_inference_steps is 4; expected 1 to original_inference_steps = 3"));
  EXPECT_THAT(refused("SASolverScheduler", {{"corrector_order", 5}}),
              HasSubstr("corrector_order is 5; expected 1 to 4"));
  EXPECT_THAT(refused("FlowMatchLCMScheduler", {{"scale_factors", {2}}}), HasSubstr("scale_factors is given"));
}

TEST(Schedulers, SigmaSchedulesOfFlowMatchingModelsAreShiftedLevels) {
  auto times = [](const char* schedule) {
    return make_scheduler(
               {{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"shift", 3.0}, {"sigma_schedule", schedule}})
        ->table(4)
        .timesteps;
  };
  auto shifted = [](double s) { return 3 * s / (1 + 2 * s); };
  const std::vector<double> simple = times("simple"), uniform = times("sgm_uniform"), kl = times("kl_optimal");
  const double least = shifted(0.001);
  for (int i = 0; i < 4; ++i) {
    expect_close(simple[static_cast<size_t>(i)], 1000 * shifted(1 - i / 4.0));
    expect_close(uniform[static_cast<size_t>(i)], 1000 * shifted(1 + (least - 1) * i / 4));
    const double low = shifted(least);
    expect_close(kl[static_cast<size_t>(i)],
                 1000 * std::tan(std::atan(1.0) + (std::atan(low) - std::atan(1.0)) * i / 3.0));
  }
}

TEST(Schedulers, InfinityOfPythonIsRead) {
  const auto c = parse_scheduler_config(R"({"a": -Infinity, "b": [Infinity, 1], "c": "say \"Infinity\" \\", "d": 2})");
  EXPECT_EQ(c, (json{{"a", -HUGE_VAL}, {"b", {HUGE_VAL, 1}}, {"c", "say \"Infinity\" \\"}, {"d", 2}}));
  EXPECT_THAT(refusal([] { parse_scheduler_config("{"); }), HasSubstr("scheduler config: "));
}

TEST(Schedulers, UnknownMembersAreNamedInAWarning) {
  testing::internal::CaptureStderr();
  make_scheduler(euler({{"timestep_spacng", "trailing"}, {"_note", 1}, {"flow_shift", 3.0}, {"sigma_min", 0.1}}));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("'timestep_spacng' is an unknown field"));
  EXPECT_THAT(log, HasSubstr("flow_shift is ignored without use_flow_sigmas"));
  EXPECT_THAT(log, HasSubstr("sigma_min and sigma_max are ignored"));
  EXPECT_THAT(log, testing::Not(HasSubstr("_note")));
}

TEST(Schedulers, EveryFieldThatASamplerReadsIsKnown) {
  const std::regex reads(R"re((?:field(?:<[^(]*>)?|choice|optional_number)\(config, "(\w+)")re");
  std::set<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(MD_SOURCE_DIR "/maxdiffusion/schedulers")) {
    if (file.path().extension() != ".cc" || file.path().stem() == "scheduler_test") continue;
    const std::string text = read_file(file.path().string());
    for (std::sregex_iterator at(text.begin(), text.end(), reads), end; at != end; ++at) names.insert((*at)[1]);
  }
  EXPECT_GT(names.size(), 40);
  for (const std::string& name : names) {
    testing::internal::CaptureStderr();
    make_scheduler(euler({{name, name == "_class_name" ? json("EulerDiscreteScheduler") : json()}}));
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << name;
  }
}

TEST(Schedulers, AShiftBySizeIsThatOfTheTokens) {
  json flow = {{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"use_dynamic_shifting", true}};
  auto times = [&](int64_t tokens) { return make_scheduler(flow, {.tokens = tokens})->table(4).timesteps; };
  // Like FlowMatchEulerDiscreteScheduler.set_timesteps(4, mu=…) of diffusers: from 1 to 1/1000, then shifted.
  auto expect = [&](int64_t tokens, double shift) {
    for (size_t i = 0; const double t : times(tokens)) {
      const double u = 1 + (0.001 - 1) * static_cast<double>(i++) / 3;
      EXPECT_NEAR(t, 1000 * shift * u / (1 + (shift - 1) * u), 1e-9) << tokens;
    }
  };
  expect(256, std::exp(0.5));
  expect(4096, std::exp(1.15));
  flow["time_shift_type"] = "linear";
  expect(4096, 1.15);
  EXPECT_THAT(refusal([&] { times(0); }), HasSubstr("the number of tokens of a sample is not given"));
  flow["base_image_seq_len"] = 4096;
  EXPECT_THAT(refusal([&] { times(1); }), HasSubstr("base_image_seq_len is 4096, max_image_seq_len 4096"));
  const json unipc = {
      {"_class_name", "UniPCMultistepScheduler"}, {"prediction_type", "flow_prediction"}, {"use_flow_sigmas", true}};
  EXPECT_EQ(make_scheduler(with(unipc, {{"use_dynamic_shifting", true}}), {.tokens = 4096})->table(4).timesteps,
            make_scheduler(with(unipc, {{"flow_shift", std::exp(1.15)}}))->table(4).timesteps);
}

TEST(Schedulers, WhatIsNotSupportedIsRefusedAndNotIgnored) {
  auto refused = [](const char* name, const json& extra) {
    return refusal([&] { make_scheduler(with(kSd, with({{"_class_name", name}}, extra)))->table(3); });
  };
  const char *ddim = "DDIMScheduler", *ddpm = "DDPMScheduler", *pndm = "PNDMScheduler", *lms = "LMSDiscreteScheduler";
  const char *dpm = "DPMSolverMultistepScheduler", *unipc = "UniPCMultistepScheduler", *e = "EulerDiscreteScheduler";
  EXPECT_THAT(refused(ddim, {{"use_dynamic_shifting", true}}),
              HasSubstr("use_dynamic_shifting is true, which this sampler does not"));
  for (const char* sampler : {pndm, lms, e, unipc})
    EXPECT_THAT(refused(sampler, {{"thresholding", true}}),
                HasSubstr("thresholding is true, which this sampler does not"));
  for (const char* sampler : {ddim, ddpm, dpm}) {
    EXPECT_THAT(refused(sampler, {{"thresholding", true}, {"dynamic_thresholding_ratio", 1.5}}),
                HasSubstr("dynamic_thresholding_ratio is 1.5; expected 0 to 1"));
    EXPECT_THAT(refused(sampler, {{"thresholding", true}, {"sample_max_value", 0}}),
                HasSubstr("sample_max_value is 0; expected a number above 0"));
  }
  EXPECT_THAT(
      refused(dpm, {{"thresholding", true}, {"algorithm_type", "dpmsolver"}, {"final_sigmas_type", "sigma_min"}}),
      HasSubstr("thresholding is true with algorithm_type dpmsolver"));
  for (const char* sampler : {ddim, ddpm, pndm})
    for (const char* name :
         {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "use_flow_sigmas"})
      EXPECT_THAT(refused(sampler, {{name, true}}), HasSubstr(std::string(name) + " is true, which this sampler"));
  for (const char* sampler : {e, lms})
    for (const char* name : {"use_lu_lambdas", "use_flow_sigmas"})
      EXPECT_THAT(refused(sampler, {{name, true}}), HasSubstr(std::string(name) + " is true, which this sampler"));
  EXPECT_THAT(refused(unipc, {{"use_lu_lambdas", true}}), HasSubstr("use_lu_lambdas is true"));
  EXPECT_THAT(refused(e, {{"timestep_spacing", "random"}}), HasSubstr("timestep_spacing is 'random'"));
  EXPECT_THAT(refused(e, {{"use_karras_sigmas", true}, {"use_exponential_sigmas", true}}),
              HasSubstr("use_exponential_sigmas is true with karras levels"));
  EXPECT_THAT(refused(dpm, {{"use_exponential_sigmas", true}, {"use_flow_sigmas", true}}),
              HasSubstr("levels are exponential and use_flow_sigmas is true; expected training or karras"));
  EXPECT_THAT(refused(e, {{"use_karras_sigmas", true}, {"sigma_min", -1}}), HasSubstr("sigma_min is -1"));
  EXPECT_THAT(refused(e, {{"use_karras_sigmas", true}, {"sigma_min", 2}, {"sigma_max", 1}}),
              HasSubstr("sigma_min is 2, sigma_max 1; expected less to more"));
  EXPECT_THAT(refused(lms, {{"final_sigmas_type", "sigma_min"}}), HasSubstr("final_sigmas_type is 'sigma_min'"));
  EXPECT_THAT(refused(lms, {{"interpolation_type", "log_linear"}}), HasSubstr("interpolation_type is 'log_linear'"));
  EXPECT_THAT(refused(ddpm, {{"variance_type", "learned"}}),
              HasSubstr("variance_type is 'learned'; expected one of: fixed"));
  EXPECT_THAT(refused(dpm, {{"variance_type", "learned_range"}}), HasSubstr("variance_type is 'learned_range'"));
  EXPECT_THAT(refused(ddim, {{"clip_sample_range", 0}}), HasSubstr("clip_sample_range is 0"));
  EXPECT_THAT(refused(ddim, {{"eta", -1}}), HasSubstr("eta is -1"));
  EXPECT_THAT(refused(pndm, {{"prediction_type", "sample"}}),
              HasSubstr("prediction_type is 'sample'; expected one of:"));
  EXPECT_THAT(refused(pndm, json::object()),
              HasSubstr("num_inference_steps is 3; PNDMScheduler expects 4 or more without skip_prk_steps"));
  for (const char* sampler : {dpm, unipc}) {
    EXPECT_THAT(refused(sampler, {{"solver_order", 4}}), HasSubstr("solver_order is 4; expected 1, 2 or 3"));
    EXPECT_THAT(refused(sampler, {{"solver_type", "rk4"}}), HasSubstr("solver_type is 'rk4'"));
    EXPECT_THAT(refused(sampler, {{"prediction_type", "flow_prediction"}}),
                HasSubstr("'flow_prediction'; expected one of:"));
  }
  EXPECT_THAT(refused(dpm, {{"algorithm_type", "dpmsolver"}}), HasSubstr("dpmsolver cannot step to no noise"));
  EXPECT_THAT(refused(dpm, {{"algorithm_type", "sde-dpmsolver"}, {"solver_order", 3}}), HasSubstr("supports 1 and 2"));
  EXPECT_THAT(refused(dpm, {{"use_flow_sigmas", true}, {"final_sigmas_type", "sigma_min"}}),
              HasSubstr("final_sigmas_type is sigma_min with use_flow_sigmas"));
  EXPECT_THAT(refused(dpm, {{"lambda_min_clipped", 9}}), HasSubstr("lambda_min_clipped is 9"));
  EXPECT_THAT(refused(unipc, {{"solver_p", {{"a", 1}}}}), HasSubstr("solver_p is given"));
  EXPECT_THAT(refused(unipc, {{"shift_terminal", 0.1}}), HasSubstr("shift_terminal needs use_flow_sigmas"));
  EXPECT_THAT(refused(unipc, {{"use_flow_sigmas", true}, {"flow_shift", 0}}), HasSubstr("flow_shift is 0"));
  EXPECT_THAT(
      refused(unipc, {{"use_flow_sigmas", true}, {"prediction_type", "flow_prediction"}, {"predict_x0", false}}),
      HasSubstr("flow_prediction, which needs predict_x0"));
  EXPECT_THAT(refusal([&] {
                make_scheduler(with(kSd, {{"_class_name", unipc}}))->table(1000);
              }),
              HasSubstr("expected at most 999"));
  EXPECT_THAT(
      refusal([&] {
        make_scheduler(with(kSd, {{"_class_name", dpm}, {"timestep_spacing", "leading"}, {"steps_offset", 1}}))
            ->table(999);
      }),
      HasSubstr("num_inference_steps is 999 with timestep_spacing leading and steps_offset 1: timestep 999 repeats"));
}

// S4-38…42
TEST(TimestepBias, WeighsTheStepsThatItsMembersName) {
  auto heavy = [](const TimestepBias& bias) {  // first and last step of weight 2, and their number
    const std::vector<double> w = bias.weights(1000);
    const auto first = std::find(w.begin(), w.end(), 2.0), last = std::find(w.rbegin(), w.rend(), 2.0).base();
    EXPECT_EQ(std::count(w.begin(), w.end(), 2.0), last - first);
    EXPECT_EQ(std::count(w.begin(), w.end(), 1.0), 1000 - (last - first));
    return std::pair{first - w.begin(), last - w.begin()};
  };
  using Range = std::pair<ptrdiff_t, ptrdiff_t>;
  EXPECT_EQ(heavy({.strategy = "later", .multiplier = 2, .portion = 0.25}), (Range{750, 1000}));
  EXPECT_EQ(heavy({.strategy = "earlier", .multiplier = 2, .portion = 0.25}), (Range{0, 250}));
  EXPECT_EQ(heavy({.strategy = "range", .multiplier = 2, .begin = 200, .end = 400}), (Range{200, 400}));
  EXPECT_EQ(TimestepBias().weights(5), std::vector<double>(5, 1.0));
  EXPECT_THROW((TimestepBias{.strategy = "range", .begin = 5, .end = 1001}.weights(1000)), Error);
  EXPECT_THROW((TimestepBias{.strategy = "later", .portion = 2}.weights(1000)), Error);
  EXPECT_THROW((TimestepBias{.strategy = "later", .multiplier = 0}.weights(1000)), Error);
}

}  // namespace
}  // namespace md
