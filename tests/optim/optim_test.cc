// Optimizers on the device, compared with torch.optim (tools/golden/optimizers.py).

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/train/update.h"
#include "tests/one_device.h"

namespace md {
namespace {

using nlohmann::json;

struct State {
  std::vector<HostArray> params;
  std::vector<std::vector<HostArray>> slots;  // [slot][parameter]
};

/// Options for graphs of one CPU device. `kernel`: they may call an optimizer's kernel; otherwise each parameter is
/// updated by separate statements, as on other devices and meshes.
GraphOptions options(bool kernel) {
  GraphOptions o = one_device().graph_options();
  o.cpu_kernels.callable &= kernel;
  return o;
}

/// One update as a program, compiled for the shapes of `s`; parameters with an empty entry in `grads` have no gradient.
class Updater {
 public:
  Updater(const OptimConfig& config, const State& s, const std::vector<HostArray>& grads, bool kernel = true)
      : graph_(options(kernel)), program_(build(config, s, grads)) {}

  std::pair<State, double> operator()(int32_t step, const State& s, const std::vector<HostArray>& grads) const {
    std::vector<HostArray> feed = {HostArray::of<int32_t>({DType::s32, {}}, {&step, 1})};
    for (const auto* list : {&s.params, &grads})
      for (const auto& a : *list)
        if (a) feed.push_back(a);
    for (const auto& slot : s.slots) feed.insert(feed.end(), slot.begin(), slot.end());
    std::vector<Array> arrays;
    for (const auto& a : feed) arrays.push_back(one_device().put(a));
    std::vector<Array*> pointers;
    for (auto& a : arrays) pointers.push_back(&a);
    const auto out = program_.run(pointers);
    State next;
    size_t at = 0;
    for (size_t i = 0; i < s.params.size(); ++i) next.params.push_back(one_device().get(out[at++]));
    for (const auto& slot : s.slots) {
      next.slots.emplace_back();
      for (size_t i = 0; i < slot.size(); ++i) next.slots.back().push_back(one_device().get(out[at++]));
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
    UpdateGroup group;
    group.params = inputs("p", s.params);
    const std::vector<Tensor> gradients = inputs("g", grads);
    for (size_t i = 0; i < s.slots.size(); ++i) group.slots.push_back(inputs(fmt::format("slot{}_", i), s.slots[i]));
    for (const Tensor p : group.params) group.axes.push_back(dim_axes(p, {}));
    const ClippedGradients clipped = clip(graph_, config, gradients, group.axes);
    group = apply_update(*make_optimizer(config),
                         {learning_rate(config, k), cast(k, DType::f32), is_finite(clipped.norm), Tensor()}, clipped,
                         group);
    for (size_t i = 0; i < group.params.size(); ++i) graph_.output("p" + std::to_string(i), group.params[i]);
    for (size_t k = 0; k < group.slots.size(); ++k)
      for (size_t i = 0; i < group.slots[k].size(); ++i)
        graph_.output(fmt::format("slot{}_{}", k, i), group.slots[k][i]);
    graph_.output("norm", clipped.norm);
    return compile(one_device(), graph_, {.jax_cache_dir = "off", .xla_flags = ""}, "update");
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
State start(std::vector<HostArray> params, size_t slots = 2) {
  State s{std::move(params), {}};
  for (size_t k = 0; k < slots; ++k) {
    s.slots.emplace_back();
    for (const auto& p : s.params) s.slots[k].push_back(zeros(p.shape()));
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

/// Keys for the options of a golden.
OptimConfig config_of(const std::string& optimizer, const json& o) {
  OptimConfig c = plain();
  c.optimizer = optimizer;
  c.learning_rate = o["lr"];
  c.max_grad_norm = o.value("max_grad_norm", 0.0);
  c.max_grad_value = o.value("max_grad_value", 0.0);
  if (optimizer == "sgd") {
    c.optimizer_arg<double>("sgd_momentum") = o["momentum"];
    c.optimizer_arg<bool>("sgd_nesterov") = o["nesterov"];
    c.optimizer_arg<double>("sgd_weight_decay") = o["weight_decay"];
  } else {
    c.optimizer_arg<double>("adam_b1") = o["betas"][0];
    c.optimizer_arg<double>("adam_b2") = o["betas"][1];
    c.optimizer_arg<double>("adam_eps") = o["eps"];
    c.optimizer_arg<double>("adam_weight_decay") = o["weight_decay"];
  }
  return c;
}

void expect_golden(const std::string& optimizer, bool kernel) {
  const json golden = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/" + optimizer + ".json"));
  for (const auto& [name, c] : golden["cases"].items()) {
    const OptimConfig config = config_of(optimizer, c["options"]);
    const size_t slots = make_optimizer(config)->slots().size();
    ASSERT_EQ(slots, c["steps"][0]["slots"].size()) << name;
    const auto shapes = c["shapes"].get<std::vector<Dims>>();
    std::vector<HostArray> params;
    for (size_t i = 0; i < shapes.size(); ++i) params.push_back(array(c["start"][i], shapes[i]));
    State s = start(params, slots);
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
        // Float32 rounding error of ten updates of size 0.02 on values near 1.
        expect_near(s.params[i], step["params"][i], 2e-6, what + " parameter " + std::to_string(i));
        for (size_t slot = 0; slot < slots; ++slot)
          expect_near(s.slots[slot][i], step["slots"][slot][i], 1e-6, fmt::format("{} slot {} of {}", what, slot, i));
      }
    }
  }
}

// S2-32…36, S4-32…36
TEST(AdamW, TenUpdatesMatchTorch) { expect_golden("adamw", false); }
TEST(AdamW, TenUpdatesOfTheKernelMatchTorch) { expect_golden("adamw", true); }
TEST(Sgd, TenUpdatesMatchTorch) {
  for (bool kernel : {true, false}) expect_golden("sgd", kernel);  // the norm's kernel; SGD has none
}

TEST(Sgd, LooksAheadOnlyAlongASum) {
  OptimConfig c;
  c.optimizer = "sgd";
  c.optimizer_arg<bool>("sgd_nesterov") = true;
  EXPECT_EQ(make_optimizer(c)->full_name(), "torch.optim.sgd.SGD(momentum=0.9,weight_decay=0,nesterov=True)");
  c.optimizer_arg<double>("sgd_momentum") = 0;
  try {
    make_optimizer(c);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_EQ(e.message(), "sgd_nesterov needs sgd_momentum, which is 0; expected more than 0");
  }
}

TEST(Optimizers, HaveArraysOfTheirOwnInTheState) {
  std::set<std::string> prefixes = {"ema/", "master/", "updates/"};
  for (const std::string& name : optimizer_names()) {
    OptimConfig c;
    c.optimizer = name;
    for (const std::string& prefix : state_prefixes(*make_optimizer(c)))
      EXPECT_TRUE(prefixes.insert(prefix).second && prefix.ends_with("/")) << prefix;
  }
}

TEST(AdamW, KernelIsDeterministicOverManyChunks) {
  // Sizes around the chunk size of the threads; norm and update must not depend on which thread took a chunk.
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
  s.slots[0][1] = HostArray::of<float>({DType::f32, {3}}, values);
  const auto [next, norm] = update(plain(), 0, s, {HostArray::of<float>({DType::f32, {3}}, values), HostArray()});
  EXPECT_NE(next.params[0].to_doubles(), s.params[0].to_doubles());
  EXPECT_EQ(next.params[1].to_doubles(), s.params[1].to_doubles());
  EXPECT_EQ(next.slots[0][1].to_doubles(), s.slots[0][1].to_doubles());
  EXPECT_NEAR(norm, std::sqrt(14.0), 1e-6);
  EXPECT_EQ(update(plain(), 0, s, {HostArray(), HostArray()}).second, 0);
}

TEST(AdamW, FirstUpdateIsTheLearningRateAtAnyScale) {
  for (float scale : {1e-6f, 1.0f, 1e6f}) {
    OptimConfig c = plain();
    c.optimizer_arg<double>("adam_weight_decay") = 0;
    c.optimizer_arg<double>("adam_eps") = 1e-12;
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
  EXPECT_NEAR(next.params[0].to_doubles()[0], 1 - 0.1 * 0.01, 1e-6);  // weight decay only
}

TEST(Optimizers, ANormThatIsNotFiniteChangesNothing) {
  const std::vector<float> values = {1, 2};
  for (const char* optimizer : {"adamw", "sgd"}) {
    OptimConfig c = plain();
    c.optimizer = optimizer;
    c.max_grad_norm = 1;
    const State s = start({HostArray::of<float>({DType::f32, {2}}, values)}, make_optimizer(c)->slots().size());
    for (bool kernel : {true, false})
      for (float bad : {NAN, INFINITY}) {
        const std::vector<HostArray> grads = {HostArray::of<float>({DType::f32, {2}}, std::vector<float>{1, bad})};
        const auto [next, norm] = Updater(c, s, grads, kernel)(0, s, grads);
        EXPECT_FALSE(std::isfinite(norm));
        EXPECT_EQ(next.params[0].to_doubles(), s.params[0].to_doubles()) << optimizer;
        for (size_t k = 0; k < s.slots.size(); ++k)
          EXPECT_EQ(next.slots[k][0].to_doubles(), s.slots[k][0].to_doubles()) << optimizer;
      }
  }
}

// Without weight decay the first update is ± the learning rate for every nonzero gradient: 3.5 becomes 4, within 1e-5
// because 1 − β in f32 has an error of 3e-5. The sizes are less than one vector, and more than the kernel keeps in the
// cache.
TEST(MovingAverage, MovesOnlyWithAppliedUpdates) {
  OptimConfig c = plain();
  c.optimizer_arg<double>("adam_weight_decay") = 0;
  c.optimizer_arg<double>("adam_eps") = 0;
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
      UpdateGroup group{.params = {param, still},
                        .slots = {{moment, still}, {moment, still}},
                        .averages = {average, average_of_still},
                        .axes = {dim_axes(param, {}), dim_axes(still, {})}};
      const ClippedGradients clipped = clip(g, c, {gradient, Tensor()}, group.axes);
      group = apply_update(*make_optimizer(c), {learning_rate(c, step), cast(step, DType::f32), healthy, keep}, clipped,
                           group);
      g.output("p", group.params[0]);
      g.output("average", group.averages[0]);
      g.output("average_of_still", group.averages[1]);
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
  EXPECT_EQ(next.slots[1][0].to_doubles(), exact.slots[1][0].to_doubles());
}

TEST(AdamW, WeightsAndMomentsOfBf16AreAMistake) {
  const HostArray one = zeros({DType::bf16, {4}});
  EXPECT_THROW(update(plain(), 0, start({one}), {one}), Error);
}

TEST(LearningRate, GraphAndHostAgree) {
  for (const std::string& name : schedule_names()) {
    OptimConfig c;
    c.lr_scheduler = name;
    c.max_train_steps = 97;
    c.lr_decay_steps = 30;
    c.lr_scheduler_min_lr_ratio = 0.1;
    c.lr_num_cycles = 3;
    c.lr_power = 2;
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
