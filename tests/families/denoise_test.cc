// The denoising loss's weights, on a UNet whose parameters are all zero: it predicts nothing, so what is left of the
// error is the noise, which the same draw gives by itself.
#include "maxdiffusion/tasks/denoise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

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

/// A "model" that predicts what it sees: the noisy sample, shifted by a thousandth of its caption's number.
class Echo final : public Family {
 public:
  Echo() : Family({.denoisers = {"echo"}, .conditioning = {{"caption", {DType::f32, {}}}}}) {}
  Conditioning encode_text(const Models&, const Conditioning& text, int64_t) const override { return text; }
  Prediction predict(const Models&, Tensor x, Tensor, const Conditioning& c, const PredictOptions&) const override {
    return {x + reshape(c.at("caption"), {x.dim(0), 1, 1, 1}) * 1e-3, {}};
  }
};

/// The loss of Echo, and what PyTorch's training scripts compute from the same draws: diffusers'
/// train_text_to_image.py (--noise_offset, --input_perturbation) and train_dreambooth.py (--prior_loss_weight).
struct EchoLoss {
  double ours, theirs;
  int dropped;
};
EchoLoss echo_loss(double offset, double perturbation, double dropout, std::optional<double> prior) {
  constexpr int64_t kBatch = 6, kChannels = 3, kEach = kChannels * 3 * 5;
  DenoiseTask task = tiny();
  task.family = std::make_shared<Echo>();
  task.size = {3, 5};
  task.noise = random_noise_input(offset, perturbation);
  task.batch_size = kBatch;
  task.caption_dropout = dropout;
  task.prior_loss_weight = prior;
  const int64_t all = prior ? 2 * kBatch : kBatch;
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Feed feed;
  std::vector<HostArray> inputs;
  std::map<std::string, std::vector<float>> values;
  for (const BatchField& f : task.batch()) {
    feed[f.name] = g.input(f.name, f.shape);
    HostArray a(f.shape);
    auto v = a.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<float>(std::sin(0.7 * static_cast<double>(i) + static_cast<double>(values.size())));
    if (f.name.find("caption") != f.name.npos)
      for (size_t i = 0; i < v.size(); ++i)
        v[i] = f.name.starts_with("empty") ? -500.0f : 100.0f * static_cast<float>(i);
    values[f.name].assign(v.begin(), v.end());
    inputs.push_back(a);
  }
  const Rng rng(g.input("key", {DType::u32, {2}}));
  const uint32_t key[2] = {3, 4};
  inputs.push_back(HostArray::of<uint32_t>({DType::u32, {2}}, key));
  const Shape latents{DType::f32, {all, 3, 5, kChannels}};
  g.output("loss", task.loss({}, feed, rng));
  g.output("noise", random_normal(rng.for_("noise"), latents));
  g.output("offset", random_normal(rng.for_("noise offset"), {DType::f32, {all, 1, 1, kChannels}}));
  g.output("perturbation", random_normal(rng.for_("perturbation"), latents));
  g.output("t", task.process->sample_timesteps(rng.for_("timestep"), all));
  g.output("drop", random_uniform(rng.for_("caption"), {DType::f32, {all}}));
  const std::vector<HostArray> out = evaluate(devices, g, inputs);
  const auto noise = out[1].to_doubles(), shift = out[2].to_doubles(), more = out[3].to_doubles(),
             t = out[4].to_doubles(), drop = out[5].to_doubles();
  std::vector<double> kept = {1};  // ᾱ of scaled_linear betas
  for (int i = 0; i < 1000; ++i) {
    const double root = std::sqrt(0.00085) + (std::sqrt(0.012) - std::sqrt(0.00085)) * i / 999;
    kept.push_back(kept.back() * (1 - root * root));
  }
  EchoLoss loss{out[0].to_doubles()[0], 0, 0};
  for (int64_t b = 0; b < all; ++b) {
    const bool of_class = b >= kBatch, dropped = drop[static_cast<size_t>(b)] < dropout;
    loss.dropped += dropped;
    const std::string prefix = of_class ? "class_" : "";
    const auto row = static_cast<size_t>(b - (of_class ? kBatch : 0));
    const double caption = dropped ? values.at("empty_caption")[0] : values.at(prefix + "caption")[row],
                 a = kept[static_cast<size_t>(t[static_cast<size_t>(b)]) + 1];
    double sum = 0;
    for (size_t i = 0; i < kEach; ++i) {
      const size_t at = static_cast<size_t>(b) * kEach + i;
      const double target = noise[at] + offset * shift[static_cast<size_t>(b) * kChannels + i % kChannels],
                   added = target + perturbation * more[at];
      const double noisy = std::sqrt(a) * values.at(prefix + "latents")[row * kEach + i] + std::sqrt(1 - a) * added;
      sum += (target - noisy - 1e-3 * caption) * (target - noisy - 1e-3 * caption);
    }
    loss.theirs += sum / (kBatch * kEach) * (of_class ? *prior : 1);
  }
  return loss;
}

TEST(DenoisingLoss, IsThatOfDiffusersScriptsWithEachKey) {
  auto expect_equal = [](const EchoLoss& l) { EXPECT_NEAR(l.ours, l.theirs, 1e-5 * l.theirs); };
  expect_equal(echo_loss(0, 0, 0, {}));
  expect_equal(echo_loss(0.5, 0, 0, {}));
  expect_equal(echo_loss(0, 0.3, 0, {}));
  const EchoLoss dropped = echo_loss(0, 0, 0.5, {});
  expect_equal(dropped);
  EXPECT_GT(dropped.dropped, 0);
  EXPECT_LT(dropped.dropped, 6);
  expect_equal(echo_loss(0, 0, 0, 0.7));
  expect_equal(echo_loss(0.5, 0.3, 0, 2.0));
}

TEST(DenoiseTask, SizesAreAFieldOfTheBatch) {
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
}

}  // namespace
}  // namespace md
