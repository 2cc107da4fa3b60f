// The denoising loss's weights, on a UNet whose parameters are all zero: it predicts nothing, so what is left of the
// error is the noise, which the same draw gives by itself.
#include "maxdiffusion/tasks/denoise.h"

#include <gtest/gtest.h>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/tiny_folder.h"

namespace md {
namespace {

constexpr int64_t kHeight = 32, kWidth = 48;  // pixels

std::shared_ptr<const NoiseProcess> process(double snr_gamma = -1) {
  ProcessKeys keys;
  keys.snr_gamma = snr_gamma;
  return make_process({{"beta_schedule", "scaled_linear"}, {"beta_start", 0.00085}, {"beta_end", 0.012}}, keys);
}

DenoiseTask tiny() {
  DenoiseTask t;
  t.family = tiny_family();
  t.process = process();
  t.media = latents_input();
  t.batch_size = 2;
  t.size = {kHeight, kWidth};
  return t;
}

struct Values {
  double loss;
  std::vector<double> noise;  // [B, h, w, C]
};

/// `mask`: [B, h, w], empty for a task without.
Values run(const DenoiseTask& task, const std::vector<float>& mask) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  ParamTable params;
  Feed feed;
  std::vector<HostArray> inputs;
  for (const BatchField& f : task.batch()) {
    feed[f.name] = g.input(f.name, f.shape);
    HostArray a(f.shape);
    auto v = a.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = f.name == "mask" ? mask[i] : static_cast<float>(i % 7);
    inputs.push_back(a);
  }
  const Rng rng(g.input("key", {DType::u32, {2}}));
  const uint32_t key[2] = {3, 4};
  inputs.push_back(HostArray::of<uint32_t>({DType::u32, {2}}, key));
  const Models zero = [&](const std::string& component) {
    return Scope(g, params, component).with_source([&](const Scope&, const Param& p) { return full(g, 0, p.shape); });
  };
  g.output("loss", task.loss(zero, feed, rng));
  g.output("noise", random_normal(rng.for_("noise"), {DType::f32, {2, 4, 6, 4}}));
  const std::vector<HostArray> out = evaluate(devices, g, inputs);
  return {out[0].to_doubles()[0], out[1].to_doubles()};
}

/// mean(m · noise²) over all elements.
double weighted(const Values& v, const std::vector<float>& mask) {
  double sum = 0;
  for (size_t i = 0; i < v.noise.size(); ++i) sum += mask[i / 4] * v.noise[i] * v.noise[i];
  return sum / static_cast<double>(v.noise.size());
}

TEST(MaskedLoss, WeighsEveryElementAndDividesByAllOfThem) {
  DenoiseTask plain = tiny(), masked = tiny();
  masked.masked = true;
  const std::vector<float> ones(48, 1.0f);
  std::vector<float> half = ones, some = ones;
  for (size_t i = 0; i < half.size(); ++i) {
    if (i % 6 < 3) half[i] = 0;  // the left half
    some[i] = static_cast<float>(i % 5) / 4;
  }
  const Values all = run(plain, {});
  EXPECT_NEAR(all.loss, weighted(all, ones), 1e-6 * all.loss);
  EXPECT_EQ(run(masked, ones).loss, all.loss);
  EXPECT_EQ(run(masked, ones).noise, all.noise);
  EXPECT_NEAR(run(masked, half).loss, weighted(all, half), 1e-6 * all.loss);
  EXPECT_NEAR(run(masked, some).loss, weighted(all, some), 1e-6 * all.loss);
  EXPECT_LT(run(masked, half).loss, 0.8 * all.loss);
  EXPECT_EQ(run(masked, std::vector<float>(ones.size(), 0.0f)).loss, 0);
}

TEST(MaskedLoss, IsWeighedByTheSignalAsWell) {
  // Min-SNR weights are factors per sample: a mask of a half everywhere halves the loss with them, too.
  DenoiseTask plain = tiny(), masked = tiny();
  plain.process = masked.process = process(0.5);
  masked.masked = true;
  const double whole = run(plain, {}).loss;
  EXPECT_LT(whole, 0.9 * run(tiny(), {}).loss);
  EXPECT_NEAR(run(masked, std::vector<float>(48, 0.5f)).loss, whole / 2, 1e-6 * whole);
}

TEST(DenoiseTask, SizesAreAFieldOfTheBatchWhereTheyAreTold) {
  DenoiseTask t = tiny();
  const auto has = [&](const char* name) {
    for (const BatchField& f : t.batch())
      if (f.name == name) return to_string(f.shape);
    return std::string("no field");
  };
  EXPECT_EQ(has("time_ids"), "no field");
  t.sizes = t.masked = true;
  EXPECT_EQ(has("time_ids"), "f32[2,6]");
  EXPECT_EQ(has("mask"), "f32[2,4,6,1]");
  EXPECT_EQ(t.variant(), "");
  t.one_of_several = true;
  EXPECT_EQ(t.variant(), "48x32");
}

}  // namespace
}  // namespace md
