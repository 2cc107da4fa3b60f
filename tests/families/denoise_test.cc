// The weights of the denoising loss, tested with an all-zero UNet: it predicts 0, so the error is the noise, which the
// same random numbers reproduce without the model.
#include "maxdiffusion/tasks/denoise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
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

/// `mask`: [B, h, w]; empty for a task without masks.
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
  // Min-SNR weights are factors per sample: a mask of 0.5 everywhere halves the loss with them too.
  DenoiseTask plain = tiny(), masked = tiny();
  plain.process = masked.process = process(0.5);
  masked.masked = true;
  const double whole = run(plain, {}).loss;
  EXPECT_LT(whole, 0.9 * run(tiny(), {}).loss);
  EXPECT_NEAR(run(masked, std::vector<float>(48, 0.5f)).loss, whole / 2, 1e-6 * whole);
}

/// A fake model that predicts its input: the noisy sample plus a thousandth of its caption's number.
class Echo final : public Family {
 public:
  Echo() : Family({.denoisers = {"echo"}, .conditioning = {{"caption", {DType::f32, {}}}}}) {}
  Conditioning encode_text(const Models&, const Conditioning& text, int64_t) const override { return text; }
  Tensor predict(const Models&, Tensor x, Tensor, const Conditioning& c, const PredictOptions&) const override {
    return {x + reshape(c.at("caption"), {x.dim(0), 1, 1, 1}) * 1e-3};
  }
};

/// The loss of Echo, and the loss that PyTorch's training scripts compute from the same random numbers: diffusers'
/// train_text_to_image.py (--noise_offset, --input_perturbation) and train_dreambooth.py (--prior_loss_weight); with
/// `flow`, a flow matching process, train_dreambooth_lora_flux.py, with weights 1/σ².
struct EchoLoss {
  double ours, theirs;
  int dropped;
};
EchoLoss echo_loss(double offset, double perturbation, double dropout, std::optional<double> prior,
                   const std::shared_ptr<const NoiseProcess>& flow = {}) {
  constexpr int64_t kBatch = 6, kChannels = 3, kEach = kChannels * 3 * 5;
  DenoiseTask task = tiny();
  task.family = std::make_shared<Echo>();
  if (flow) task.process = flow;
  task.size = {3, 5};
  task.noise = random_noise_input({.offset = offset, .perturbation = perturbation});
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
  const Tensor times = task.process->sample_timesteps(rng.for_("timestep"), all);
  g.output("t", flow ? flow->model_timestep(times) * 1e-3 : times);  // with `flow`: σ
  g.output("drop", random_uniform(rng.for_("caption"), {DType::f32, {all}}));
  const std::vector<HostArray> out = evaluate(devices, g, inputs);
  const auto noise = out[1].to_doubles(), shift = out[2].to_doubles(), extra = out[3].to_doubles(),
             t = out[4].to_doubles(), drop = out[5].to_doubles();
  std::vector<double> alphas_cumprod = {1};  // ᾱ of scaled_linear betas
  for (int i = 0; i < 1000; ++i) {
    const double root = std::sqrt(0.00085) + (std::sqrt(0.012) - std::sqrt(0.00085)) * i / 999;
    alphas_cumprod.push_back(alphas_cumprod.back() * (1 - root * root));
  }
  EchoLoss loss{out[0].to_doubles()[0], 0, 0};
  for (int64_t b = 0; b < all; ++b) {
    const bool of_class = b >= kBatch, dropped = drop[static_cast<size_t>(b)] < dropout;
    loss.dropped += dropped;
    const std::string prefix = of_class ? "class_" : "";
    const auto row = static_cast<size_t>(b - (of_class ? kBatch : 0));
    const double caption = dropped ? values.at("empty_caption")[0] : values.at(prefix + "caption")[row],
                 time = t[static_cast<size_t>(b)], a = flow ? 0 : alphas_cumprod[static_cast<size_t>(time) + 1],
                 signal = flow ? 1 - time : std::sqrt(a), level = flow ? time : std::sqrt(1 - a);
    double sum = 0;
    for (size_t i = 0; i < kEach; ++i) {
      const size_t at = static_cast<size_t>(b) * kEach + i;
      const double x0 = values.at(prefix + "latents")[row * kEach + i],
                   plain = noise[at] + offset * shift[static_cast<size_t>(b) * kChannels + i % kChannels],
                   noisy = signal * x0 + level * (plain + perturbation * extra[at]),
                   error = (flow ? plain - x0 : plain) - noisy - 1e-3 * caption;
      sum += error * error;
    }
    loss.theirs += sum / (kBatch * kEach) * (of_class ? *prior : 1) / (flow ? time * time : 1);
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
  ProcessKeys keys;
  keys.weighting_scheme = "sigma_sqrt";
  const auto flow = make_process({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}, keys);
  expect_equal(echo_loss(0, 0, 0, {}, flow));
  expect_equal(echo_loss(0, 0, 0.5, 0.7, flow));
  expect_equal(echo_loss(0.5, 0.3, 0, 2.0, flow));
}

const nlohmann::json& golden() {
  static const nlohmann::json all = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/noise_times.json"));
  return all;
}

/// f of a graph of its own, computed.
template <class F>
std::vector<double> computed(F f) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  g.output("y", f(g));
  return evaluate(devices, g, {})[0].to_doubles();
}

template <class T>
Tensor numbers(Graph& g, DType type, const nlohmann::json& values) {
  const auto all = values.get<std::vector<T>>();
  return constant(g, HostArray::of<T>({type, {std::ssize(all)}}, all));
}

// tools/golden/noise_times.py
TEST(Distance, IsThatOfKohyasScripts) {
  for (const nlohmann::json& of : golden()["distances"])
    for (const char* type : {"l1", "l2", "huber", "smooth_l1"}) {
      const Distance distance{.type = type, .c = of["c"].get<double>() / 2, .scale = 2, .schedule = "constant"};
      const std::vector<double> y = computed([&](Graph& g) {
        const Tensor e = reshape(numbers<float>(g, DType::f32, of["e"]), {1, 1, 6});
        return distance.of(e, full(g, 0, {DType::s32, {1}}), *process());
      });
      for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], of[type][i].get<double>(), 1e-6 * y[i]) << type << of;
    }
}

TEST(Distance, ItsThresholdFollowsTheSchedule) {
  for (const nlohmann::json& of : golden()["noise_models"]) {
    const auto noise = make_process({{"beta_schedule", "scaled_linear"},
                                     {"beta_start", 0.00085},
                                     {"beta_end", 0.012},
                                     {"rescale_betas_zero_snr", of["zero"]},
                                     {"prediction_type", of["prediction_type"]}},
                                    {});
    for (const std::string schedule : {"snr", "exponential"}) {
      const Distance distance{.type = "smooth_l1", .c = 0.1, .scale = 0.5, .schedule = schedule};
      const std::vector<double> y = computed([&](Graph& g) {
        return distance.of(full(g, 2, {DType::f32, {6, 1}}), numbers<int32_t>(g, DType::s32, of["timesteps"]), *noise);
      });
      for (size_t i = 0; i < y.size(); ++i) {
        const double c = of["threshold_" + schedule][i];
        EXPECT_NEAR(y[i], 2 * (std::sqrt(4 + c * c) - c), 1e-4) << schedule << i;
      }
    }
  }
}

/// Bilinear interpolation of the first rows × columns of z, [H, W], to all of it.
std::vector<double> enlarged(const std::vector<double>& z, int64_t width, int64_t rows, int64_t columns, int64_t h,
                             int64_t w) {
  const auto place = [](int64_t i, int64_t part, int64_t whole) {
    const double at =
        std::max(0.0, (static_cast<double>(i) + 0.5) * static_cast<double>(part) / static_cast<double>(whole) - 0.5);
    const auto from = static_cast<int64_t>(at);
    return std::tuple(from, std::min(from + 1, part - 1), at - static_cast<double>(from));
  };
  std::vector<double> y;
  for (int64_t i = 0; i < h; ++i)
    for (int64_t j = 0; j < w; ++j) {
      const auto [a, b, u] = place(i, rows, h);
      const auto [c, d, v] = place(j, columns, w);
      const auto at = [&](int64_t row, int64_t column) { return z[static_cast<size_t>(row * width + column)]; };
      y.push_back((1 - u) * ((1 - v) * at(a, c) + v * at(a, d)) + u * ((1 - v) * at(b, c) + v * at(b, d)));
    }
  return y;
}

TEST(MultiresNoise, IsThatOfKohyasScripts) {
  std::vector<double> z, expected;
  for (const auto& row : golden()["enlarged"]["from"]) z.insert(z.end(), row.begin(), row.end());
  for (const auto& row : golden()["enlarged"]["to"]) expected.insert(expected.end(), row.begin(), row.end());
  const std::vector<double> of_torch = enlarged(z, 2, 3, 2, 7, 5);
  for (size_t i = 0; i < of_torch.size(); ++i) EXPECT_NEAR(of_torch[i], expected[i], 1e-6);

  // Two samples of two frames of 9 × 7 with one channel, from the same random numbers.
  constexpr int64_t kB = 2, kF = 2, kH = 9, kW = 7, kOne = kF * kH * kW;
  constexpr int kIterations = 4;
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  const Rng rng = Rng::seed(g, 3);
  const Shape shape{DType::f32, {kB, kF, kH, kW, 1}};
  const Tensor plain = random_normal(rng.for_("plain"), shape);
  g.output("y", MultiresNoise{kIterations, 0.6}.of(plain, rng));
  g.output("plain", plain);
  for (uint32_t i = 0; i < kIterations; ++i) {
    g.output("noise" + std::to_string(i), random_normal(rng.for_("noise").fold(i), shape));
    g.output("ratio" + std::to_string(i), random_uniform(rng.for_("ratio").fold(i), {DType::f32, {kB, 1, 1}}, 2, 4));
  }
  std::vector<std::vector<double>> out;
  for (const HostArray& a : evaluate(devices, g, {})) out.push_back(a.to_doubles());
  bool ends_early = false;
  for (int64_t b = 0; b < kB; ++b) {
    const auto part = [&](const std::vector<double>& all, int64_t from, int64_t count) {
      return std::vector<double>(all.begin() + from, all.begin() + from + count);
    };
    std::vector<double> sum = part(out[1], b * kOne, kOne);
    for (size_t i = 0; i < kIterations; ++i) {
      const double power = std::pow(out[3 + 2 * i][static_cast<size_t>(b)], i);
      const auto rows = std::max<int64_t>(1, static_cast<int64_t>(kH / power)),
                 columns = std::max<int64_t>(1, static_cast<int64_t>(kW / power));
      for (int64_t f = 0; f < kF; ++f) {
        const std::vector<double> y =
            enlarged(part(out[2 + 2 * i], b * kOne + f * kH * kW, kH * kW), kW, rows, columns, kH, kW);
        for (size_t k = 0; k < y.size(); ++k) sum[static_cast<size_t>(f) * y.size() + k] += y[k] * std::pow(0.6, i);
      }
      if (rows > 1 && columns > 1) continue;
      ends_early = ends_early || i + 1 < kIterations;
      break;
    }
    double total = 0, squares = 0;
    for (double v : sum) total += v;
    for (double v : sum) squares += (v - total / kOne) * (v - total / kOne);
    const double deviation = std::sqrt(squares / (kOne - 1));
    for (size_t k = 0; k < sum.size(); ++k)
      ASSERT_NEAR(out[0][static_cast<size_t>(b) * kOne + k], sum[k] / deviation, 2e-5) << b << " " << k;
  }
  EXPECT_TRUE(ends_early);
}

TEST(DenoisingLoss, OfAnotherDistanceIsItsMean) {
  DenoiseTask task = tiny();
  const Values plain = run(task, {});
  task.distance = {.type = "l1"};
  double sum = 0;
  for (double e : plain.noise) sum += std::abs(e);
  const Values l1 = run(task, {});
  EXPECT_NEAR(l1.loss, sum / static_cast<double>(plain.noise.size()), 1e-6);
  task.noise = random_noise_input({.multires = {6, 0.4}});
  task.distance = {};
  EXPECT_NEAR(run(task, {}).loss, 1, 0.05);  // of noise whose deviation is 1
  EXPECT_NE(run(task, {}).loss, plain.loss);
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
