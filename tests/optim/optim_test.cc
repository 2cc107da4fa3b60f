// The optimizer on the device, against torch.optim.AdamW (tools/golden/adamw.py).

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/optim/optimizer.h"
#include "tests/one_device.h"

namespace md {
namespace {

using nlohmann::json;

struct State {
  std::vector<HostArray> params, first, second;
};

/// Graphs of one CPU device may call the AdamW kernel; without it, every parameter is updated by its own statements, as
/// on other devices and meshes.
GraphOptions options(bool kernel) {
  GraphOptions o = one_device().graph_options();
  o.cpu_kernels.callable &= kernel;
  return o;
}

/// One update as a program: compiled for the shapes of `s`; parameters without a gradient are those where `grads` is
/// empty.
class Updater {
 public:
  Updater(const OptimConfig& config, const State& s, const std::vector<HostArray>& grads, bool kernel = true)
      : graph_(options(kernel)), program_(build(config, s, grads)) {}

  std::pair<State, double> operator()(int32_t step, const State& s, const std::vector<HostArray>& grads) const {
    std::vector<HostArray> feed = {HostArray::of<int32_t>({DType::s32, {}}, {&step, 1})};
    for (const auto* list : {&s.params, &grads, &s.first, &s.second})
      for (const auto& a : *list)
        if (a) feed.push_back(a);
    std::vector<Array> arrays;
    for (const auto& a : feed) arrays.push_back(one_device().put(a));
    std::vector<Array*> pointers;
    for (auto& a : arrays) pointers.push_back(&a);
    const auto out = program_.run(pointers);
    State next;
    for (size_t i = 0; i < s.params.size(); ++i) {
      next.params.push_back(one_device().get(out[3 * i]));
      next.first.push_back(one_device().get(out[3 * i + 1]));
      next.second.push_back(one_device().get(out[3 * i + 2]));
    }
    return {next, one_device().get(out.back()).to_doubles()[0]};
  }

 private:
  Program build(const OptimConfig& config, const State& s, const std::vector<HostArray>& grads) {
    auto inputs = [&](const std::string& name, const std::vector<HostArray>& arrays) {
      std::vector<Tensor> tensors;
      for (size_t i = 0; i < arrays.size(); ++i)
        tensors.push_back(arrays[i] ? graph_.input(name + std::to_string(i), arrays[i].shape()) : Tensor());
      return tensors;
    };
    Tensor k = graph_.input("step", {DType::s32, {}});
    auto p = inputs("p", s.params), d = inputs("g", grads), m = inputs("m", s.first), v = inputs("v", s.second);
    const Update u = adamw(config, k, p, d, m, v);
    for (size_t i = 0; i < p.size(); ++i) {
      graph_.output("p" + std::to_string(i), u.params[i]);
      graph_.output("m" + std::to_string(i), u.first_moments[i]);
      graph_.output("v" + std::to_string(i), u.second_moments[i]);
    }
    graph_.output("norm", u.grad_norm);
    return compile(one_device(), graph_, {.jax_cache_dir = "off", .xla_flags = ""}, "adamw");
  }

  Graph graph_;
  Program program_;
};

std::pair<State, double> update(const OptimConfig& config, int32_t step, const State& s,
                                const std::vector<HostArray>& grads) {
  return Updater(config, s, grads)(step, s, grads);
}

HostArray array(const json& values, const Dims& dims) {
  return HostArray::of<float>({DType::f32, dims}, values.get<std::vector<float>>());
}
HostArray zeros(const Shape& shape) {
  HostArray a(shape);
  std::fill_n(a.mutable_data(), a.bytes(), std::byte{0});
  return a;
}
State start(std::vector<HostArray> params) {
  State s{std::move(params), {}, {}};
  for (const auto& p : s.params) {
    s.first.push_back(zeros(p.shape()));
    s.second.push_back(zeros(p.shape()));
  }
  return s;
}

OptimConfig plain() {
  OptimConfig c;
  c.lr_scheduler = "constant";
  c.learning_rate = 0.1;
  c.max_grad_norm = 0;
  return c;
}

void expect_near(const HostArray& found, const json& expected, double tolerance, const std::string& what) {
  const auto values = found.to_doubles();
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(values[i], expected[i].get<double>(), tolerance) << what << " element " << i;
}

void expect_golden(bool kernel) {
  const json golden = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/adamw.json"));
  for (const auto& [name, c] : golden["cases"].items()) {
    const json& o = c["options"];
    OptimConfig config = plain();
    config.learning_rate = o["lr"];
    config.adam_b1 = o["betas"][0];
    config.adam_b2 = o["betas"][1];
    config.adam_eps = o["eps"];
    config.adam_weight_decay = o["weight_decay"];
    config.max_grad_norm = o.value("max_grad_norm", 0.0);
    config.max_grad_value = o.value("max_grad_value", 0.0);
    const auto shapes = c["shapes"].get<std::vector<Dims>>();
    std::vector<HostArray> params;
    for (size_t i = 0; i < shapes.size(); ++i) params.push_back(array(c["start"][i], shapes[i]));
    State s = start(params);
    const Updater updater(config, s, params, kernel);  // gradients have the shapes of the parameters
    for (int k = 0; k < 10; ++k) {
      const json& step = c["steps"][static_cast<size_t>(k)];
      std::vector<HostArray> grads;
      for (size_t i = 0; i < shapes.size(); ++i) grads.push_back(array(step["gradients"][i], shapes[i]));
      double norm = 0;
      std::tie(s, norm) = updater(k, s, grads);
      const std::string what = name + " update " + std::to_string(k);
      EXPECT_NEAR(norm, step["norm"].get<double>(), 2e-6 * (1 + norm)) << what;
      for (size_t i = 0; i < shapes.size(); ++i) {
        // Float32 rounding of ten updates of size 0.02 on values near 1.
        expect_near(s.params[i], step["params"][i], 2e-6, what + " parameter " + std::to_string(i));
        expect_near(s.first[i], step["first"][i], 1e-6, what + " first moment " + std::to_string(i));
        expect_near(s.second[i], step["second"][i], 1e-6, what + " second moment " + std::to_string(i));
      }
    }
  }
}

// S2-32…36, S4-32…36
TEST(AdamW, TenUpdatesMatchTorch) { expect_golden(false); }
TEST(AdamW, TenUpdatesOfTheKernelMatchTorch) { expect_golden(true); }

TEST(AdamW, KernelIsDeterministicOverManyPieces) {
  // Sizes around the pieces that threads take in turns; norm and update must not depend on who took which.
  OptimConfig c = plain();
  c.max_grad_norm = 0.5;
  c.max_grad_value = 0.9;
  std::vector<HostArray> params, grads;
  for (int64_t n : {1, 15, 65535, 65536, 65537, 400000}) {
    std::vector<float> p(static_cast<size_t>(n)), g(p.size());
    for (size_t i = 0; i < p.size(); ++i) {
      p[i] = std::sin(static_cast<float>(i));
      g[i] = std::cos(static_cast<float>(3 * i));
    }
    params.push_back(HostArray::of<float>({DType::f32, {n}}, p));
    grads.push_back(HostArray::of<float>({DType::f32, {n}}, g));
  }
  const State s = start(params);
  const Updater by_kernel(c, s, grads), by_statements(c, s, grads, false);
  const auto [first, norm] = by_kernel(0, s, grads);
  const auto [expected, expected_norm] = by_statements(0, s, grads);
  EXPECT_NEAR(norm, expected_norm, 1e-5 * expected_norm);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto a = first.params[i].to_doubles(), b = expected.params[i].to_doubles();
    double worst = 0;
    for (size_t j = 0; j < a.size(); ++j) worst = std::max(worst, std::abs(a[j] - b[j]));
    EXPECT_LT(worst, 1e-5) << to_string(params[i].shape());
  }
  for (int again = 0; again < 3; ++again) {
    const auto [next, same_norm] = by_kernel(0, s, grads);
    EXPECT_EQ(same_norm, norm);
    for (size_t i = 0; i < params.size(); ++i) EXPECT_EQ(next.params[i].to_doubles(), first.params[i].to_doubles());
  }
}

TEST(AdamW, AnEmptyGradientLeavesEverythingAsItIs) {
  const std::vector<float> values = {1, -2, 3};
  State s = start({HostArray::of<float>({DType::f32, {3}}, values), HostArray::of<float>({DType::f32, {3}}, values)});
  s.first[1] = HostArray::of<float>({DType::f32, {3}}, values);
  const auto [next, norm] = update(plain(), 0, s, {HostArray::of<float>({DType::f32, {3}}, values), HostArray()});
  EXPECT_NE(next.params[0].to_doubles(), s.params[0].to_doubles());
  EXPECT_EQ(next.params[1].to_doubles(), s.params[1].to_doubles());
  EXPECT_EQ(next.first[1].to_doubles(), s.first[1].to_doubles());
  EXPECT_NEAR(norm, std::sqrt(14.0), 1e-6);
  EXPECT_EQ(update(plain(), 0, s, {HostArray(), HostArray()}).second, 0);
}

TEST(AdamW, FirstUpdateMovesByTheLearningRateWhateverTheScale) {
  for (float scale : {1e-6f, 1.0f, 1e6f}) {
    OptimConfig c = plain();
    c.adam_weight_decay = 0;
    c.adam_eps = 1e-12;
    const float one = 1.0f;
    const auto [next, norm] = update(c, 0, start({HostArray::of<float>({DType::f32, {}}, {&one, 1})}),
                                     {HostArray::of<float>({DType::f32, {}}, {&scale, 1})});
    EXPECT_NEAR(next.params[0].to_doubles()[0], 0.9, 1e-5) << scale;  // bias correction is exact at step 0
  }
}

TEST(AdamW, ZeroGradientsDoNotDivideByTheirNorm) {
  OptimConfig c = plain();
  c.max_grad_norm = 1;
  const float one = 1.0f;
  const State s = start({HostArray::of<float>({DType::f32, {}}, {&one, 1})});
  const auto [next, norm] = update(c, 0, s, {zeros({DType::f32, {}})});
  EXPECT_EQ(norm, 0);
  EXPECT_NEAR(next.params[0].to_doubles()[0], 1 - 0.1 * 0.01, 1e-6);  // decay alone
}

TEST(AdamW, ANormThatIsNotFiniteChangesNothing) {
  OptimConfig c = plain();
  c.max_grad_norm = 1;
  const std::vector<float> values = {1, 2};
  const State s = start({HostArray::of<float>({DType::f32, {2}}, values)});
  for (bool kernel : {true, false})
    for (float bad : {NAN, INFINITY}) {
      const std::vector<HostArray> grads = {HostArray::of<float>({DType::f32, {2}}, std::vector<float>{1, bad})};
      const auto [next, norm] = Updater(c, s, grads, kernel)(0, s, grads);
      EXPECT_FALSE(std::isfinite(norm));
      EXPECT_EQ(next.params[0].to_doubles(), s.params[0].to_doubles());
      EXPECT_EQ(next.first[0].to_doubles(), s.first[0].to_doubles());
      EXPECT_EQ(next.second[0].to_doubles(), s.second[0].to_doubles());
    }
}

// The first update without decay is one of ± the learning rate wherever there is a gradient: 3.5 becomes 4, within 1e-5
// since 1 − β of f32 has an error of 3e-5. Sizes of a part of a vector, and of more than what the kernel holds in the
// cache at once.
TEST(MovingAverage, MovesTowardsTheNewParametersWhereAppliedAndOnlyThere) {
  OptimConfig c = plain();
  c.adam_weight_decay = 0;
  c.adam_eps = 0;
  c.learning_rate = 0.5;
  for (bool kernel : {true, false})
    for (int64_t n : {3, 70'003}) {
      Graph g(options(kernel));
      const Shape shape{DType::f32, {n}};
      Tensor step = g.input("step", {DType::s32, {}}), keep = g.input("keep", {DType::f32, {}}),
             healthy = g.input("healthy", {DType::pred, {}}), still = g.input("still", shape),
             average_of_still = g.input("average_of_still", shape), param = g.input("param", shape),
             gradient = g.input("gradient", shape), moment = g.input("moment", shape),
             average = g.input("average", shape);
      const Update u = adamw(c, step, {param, still}, {gradient, Tensor()}, {moment, still}, {moment, still}, healthy,
                             {}, {.values = {average, average_of_still}, .keep = keep});
      g.output("p", u.params[0]);
      g.output("average", u.averages[0]);
      g.output("average_of_still", u.averages[1]);
      auto filled = [&](const std::vector<float>& pattern) {
        std::vector<float> values(static_cast<size_t>(n));
        for (size_t i = 0; i < values.size(); ++i) values[i] = pattern[i % pattern.size()];
        return HostArray::of<float>(shape, values);
      };
      const int32_t first = 0;
      const float part = 0.75f;
      const std::vector<float> averages = {1, 4, -4, 12};
      for (bool on : {true, false}) {
        const auto out = evaluate(
            one_device(), g,
            {HostArray::of<int32_t>({DType::s32, {}}, {&first, 1}), HostArray::of<float>({DType::f32, {}}, {&part, 1}),
             HostArray::of<bool>({DType::pred, {}}, {&on, 1}), filled({7}), filled({9}), filled({3.5f}), filled({-2}),
             filled({0}), filled(averages)});
        const std::vector<double> p = out[0].to_doubles(), moved = out[1].to_doubles();
        for (size_t i = 0; i < p.size(); ++i) {
          const double from = averages[i % averages.size()];
          ASSERT_NEAR(p[i], on ? 4 : 3.5, 1e-5) << kernel << n;
          ASSERT_FLOAT_EQ(static_cast<float>(moved[i]), static_cast<float>(on ? p[i] + (from - p[i]) * 0.75 : from))
              << kernel << n << " " << i;
        }
        for (const double a : out[2].to_doubles()) ASSERT_EQ(a, 9) << kernel << n;
      }
    }
}

TEST(AdamW, TakesGradientsOfBf16AsTheNumbersThatTheyAre) {
  const std::vector<float> values = {1, -2, 3, 0.5};
  const HostArray f32 = HostArray::of<float>({DType::f32, {4}}, values);
  const auto [next, norm] = update(plain(), 0, start({f32}), {f32.cast(DType::bf16)});
  const auto [exact, exact_norm] = update(plain(), 0, start({f32}), {f32});
  EXPECT_EQ(norm, exact_norm);
  EXPECT_EQ(next.params[0].to_doubles(), exact.params[0].to_doubles());
  EXPECT_EQ(next.second[0].to_doubles(), exact.second[0].to_doubles());
}

TEST(AdamW, WeightsAndMomentsOfBf16AreAMistake) {
  const HostArray one = zeros({DType::bf16, {4}});
  EXPECT_THROW(update(plain(), 0, start({one}), {one}), Error);
}

TEST(LearningRate, GraphAndHostAgree) {
  for (const char* name : {"constant", "constant_with_warmup", "linear", "cosine"}) {
    OptimConfig c;
    c.lr_scheduler = name;
    c.max_train_steps = 97;
    c.warmup_steps_fraction = 0.13;
    const std::vector<int32_t> steps = {0, 1, 5, 11, 12, 13, 50, 96, 97, 500};
    const Shape shape{DType::s32, {static_cast<int64_t>(steps.size())}};
    Graph g(one_device().graph_options());
    g.output("lr", learning_rate(c, g.input("step", shape)));
    const auto found = evaluate(one_device(), g, {HostArray::of<int32_t>(shape, steps)})[0].to_doubles();
    for (size_t i = 0; i < steps.size(); ++i)
      EXPECT_NEAR(found[i], learning_rate(c, int64_t{steps[i]}), 1e-6 * c.learning_rate)
          << name << " update " << steps[i];
  }
}

}  // namespace
}  // namespace md
