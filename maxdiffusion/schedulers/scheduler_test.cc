// Host arithmetic of schedules and samplers. Numbers are those of an independent implementation in float32; runs
// through a device are in tests/schedulers.

#include "maxdiffusion/schedulers/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const json kSd = {{"beta_start", 0.00085}, {"beta_end", 0.012}, {"beta_schedule", "scaled_linear"}};

json with(json config, const json& more) {
  config.update(more);
  return config;
}
json euler(const json& more = json::object()) {
  return with(kSd, with({{"_class_name", "EulerDiscreteScheduler"}}, more));
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
    expect_close(n.alphas_cumprod[998], 1.96796e-07, 1e-4);  // the recorded number has lost digits to float32
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
              HasSubstr("beta_schedule is 'cubic'; known are linear, scaled_linear"));
  EXPECT_THAT(load({{"prediction_type", "flow"}}), HasSubstr("prediction_type is 'flow'; known are epsilon"));
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
    const auto table = make_scheduler(euler({{"timestep_spacing", c.spacing}}))->table(c.steps);
    ASSERT_EQ(static_cast<int64_t>(table.timesteps.size()), c.steps);
    for (size_t i = 0; i < c.timesteps.size(); ++i) expect_close(table.timesteps[i], c.timesteps[i], 1e-6);
    expect_close(table.init_noise_sigma, c.init);
    const auto rows = table.rows.view<float>();
    for (size_t i = 0; i < c.sigmas.size(); ++i) {
      const double scale = rows[3 * i];  // 1/√(σ² + 1)
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
    EXPECT_NEAR(table.rows.view<float>()[2], -14.6146, 1e-4);  // all the way to σ = 0
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
    EXPECT_THAT(refusal([&] { s->table(0); }),
                HasSubstr("0 inference steps; expected 1 to num_train_timesteps = 1000"));
    EXPECT_THAT(refusal([&] { s->table(1001); }), HasSubstr("1001 inference steps"));
  }
}

TEST(Schedulers, NamesAreKnownWithAndWithoutFlax) {
  EXPECT_EQ(make_scheduler(euler({{"_class_name", "FlaxEulerDiscreteScheduler"}}))->name(), "EulerDiscreteScheduler");
  const auto what = refusal([] { make_scheduler({{"_class_name", "HeunDiscreteScheduler"}}); });
  EXPECT_THAT(what, HasSubstr("'HeunDiscreteScheduler' is not one of: DDPMScheduler, DDIMScheduler, EulerDiscrete"));
  EXPECT_THAT(refusal([] { make_scheduler(json::object()); }), HasSubstr("_class_name is missing"));
}

TEST(Schedulers, WhatIsNotSupportedIsRefusedAndNotIgnored) {
  EXPECT_THAT(refusal([] {
                make_scheduler(euler({{"use_karras_sigmas", true}}));
              }),
              HasSubstr("use_karras_sigmas is true, which is not supported"));
  EXPECT_THAT(refusal([] {
                make_scheduler(euler({{"timestep_spacing", "random"}}));
              }),
              HasSubstr("timestep_spacing is 'random'"));
  EXPECT_THAT(refusal([] {
                make_scheduler({{"_class_name", "DDPMScheduler"}, {"variance_type", "learned"}});
              }),
              HasSubstr("variance_type is 'learned'; known are fixed_small"));
}

}  // namespace
}  // namespace md
