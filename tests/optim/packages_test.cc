// Optimizers compared with their published packages (tools/golden/optimizer_packages.py), and tests for every
// registered optimizer: a mesh gives the results of one device, resuming changes nothing, arguments have an effect.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/dynamic_map.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/one_device.h"
#include "tests/optim/small_problem.h"

namespace md {
namespace {

using nlohmann::json;

HostArray array(const json& values, const Dims& dims) {
  return HostArray::of<float>({DType::f32, dims}, values.get<std::vector<float>>());
}

SmallProblem quadratic(const json& data, const std::vector<Dims>& shapes) {
  SmallProblem p;
  for (const Dims& dims : shapes) p.params.push_back({dims, {}});
  p.loss = [data, shapes](const std::vector<Tensor>& params) {
    Tensor total;
    for (size_t i = 0; i < params.size(); ++i) {
      Graph& g = params[i].graph();
      const Tensor far = params[i] - constant(g, array(data["goal"][i], shapes[i]));
      const Tensor part = sum(constant(g, array(data["curvature"][i], shapes[i])) * square(far)) * 0.5;
      total = total ? total + part : part;
    }
    return total;
  };
  return p;
}

Tensor network_error(const std::vector<Tensor>& p, Tensor x, Tensor goal) {
  auto linear = [](Tensor in, Tensor w, Tensor b) {
    return dot(in, w, {.lhs_contract = {1}, .rhs_contract = {1}, .precision = Precision::highest}) + b;
  };
  return mean(square(linear(tanh(linear(x, p[0], p[1])), p[2], p[3]) - goal));
}

SmallProblem network(const json& data, const std::vector<Dims>& shapes) {
  SmallProblem p;
  for (const Dims& dims : shapes) p.params.push_back({dims, {}});
  p.loss = [data, shapes](const std::vector<Tensor>& params) {
    Graph& g = params[0].graph();
    return network_error(params, constant(g, array(data["x"], {8, shapes[0][1]})),
                         constant(g, array(data["goal"], {8, shapes[2][0]})));
  };
  return p;
}

OptimConfig config_for(const std::string& optimizer) {
  OptimConfig c;
  c.optimizer = optimizer;
  c.lr_scheduler = "constant";
  c.learning_rate = 1e-2;
  c.max_grad_norm = c.max_grad_value = 0;
  for (const OptimizerArgument& a : optimizer_arguments(optimizer))
    if (a.name == "min_8bit_size") c.optimizer_args = {"min_8bit_size=100"};
  return c;
}

void expect_values(const HostArray& found, const json& expected, double tolerance, const std::string& what) {
  const std::vector<double> values = found.to_doubles();
  ASSERT_EQ(values.size(), expected.size()) << what;
  if (found.dtype() == DType::u8) {
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_LE(std::abs(values[i] - expected[i].get<double>()), tolerance < 1e-3 ? 0 : 1) << what << " element " << i;
    return;
  }
  double largest = 1e-2;
  for (const json& wanted : expected) largest = std::max(largest, std::abs(wanted.get<double>()));
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(values[i], expected[i].get<double>(), tolerance * largest) << what << " element " << i;
}

void expect_state(const SmallState& state, const json& expected, const Optimizer& optimizer, double tolerance,
                  const std::string& what) {
  const std::vector<StateSlot> slots = optimizer.slots();
  for (size_t i = 0; i < expected["params"].size(); ++i) {
    const std::string p = "p" + std::to_string(i);
    expect_values(state.at(p), expected["params"][i], tolerance, what + p);
    ASSERT_EQ(slots.size(), expected["slots"].size());
    for (size_t k = 0; k < slots.size(); ++k) {
      const json& slot = expected["slots"][k][i];
      ASSERT_EQ(slot.is_null(), !state.contains(slots[k].prefix + p)) << what << slots[k].prefix << p;
      if (!slot.is_null()) expect_values(state.at(slots[k].prefix + p), slot, tolerance, what + slots[k].prefix + p);
    }
  }
  const std::vector<StateScalar> scalars = optimizer.scalars();
  for (size_t k = 0; k < scalars.size(); ++k)
    expect_values(state.at(scalars[k].prefix + std::string("all")), json::array({expected["scalars"][k]}), tolerance,
                  what + scalars[k].prefix);
}

/// Optimizers that have CPU kernels.
constexpr std::string_view kWithKernel[] = {"adafactor", "adamw", "adamw8bit", "came", "lion"};

class Package : public testing::TestWithParam<std::string> {};

// The packages ran in float64. Updates are normalized: near a minimum, rounding of a gradient is a fraction of a step,
// so errors are relative to the largest element of an array. An 8-bit moment between two codes may get either.
TEST_P(Package, FiftyUpdatesOfAQuadraticAndANetworkMatch) {
  const std::string file = MD_SOURCE_DIR "/tests/golden/" + GetParam() + ".json";
  const json golden = parse_json(read_file(file));
  for (const auto& [name, c] : golden["cases"].items()) {
    OptimConfig config = config_for(GetParam());
    config.learning_rate = c["lr"];
    config.optimizer_args = c["args"].get<std::vector<std::string>>();
    const auto shapes = c["shapes"].get<std::vector<Dims>>();
    const SmallProblem problem =
        c["problem"] == "quadratic" ? quadratic(c["data"], shapes) : network(c["data"], shapes);
    std::vector<HostArray> start;
    for (size_t i = 0; i < shapes.size(); ++i) start.push_back(array(c["start"][i], shapes[i]));
    for (const bool kernel : {false, true}) {
      if (kernel && std::ranges::count(kWithKernel, GetParam()) == 0) continue;
      SmallTraining training(one_device(), config, problem, kernel);
      SmallState state = training.start(start);
      int done = 0;
      for (const int step : {1, 50}) {
        state = training.run(state, done, step);
        done = step;
        expect_state(state, c["steps"][std::to_string(step)], training.optimizer(),
                     step == 1                   ? (kernel ? 3e-5 : 1e-5)
                     : GetParam() == "adamw8bit" ? 1e-2
                                                 : 1e-3,
                     fmt::format("{} after {}, {}: ", name, step, kernel ? "kernel" : "statements"));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Package,
                         testing::Values("adafactor", "adamw8bit", "came", "lion", "muon", "prodigy",
                                         "schedule_free_adamw"),
                         [](const auto& info) { return info.param; });

/// A loss whose gradient is `slope` everywhere.
SmallProblem slope_of(const HostArray& slope) {
  SmallProblem p;
  p.params = {{slope.dims(), {}}};
  p.loss = [slope](const std::vector<Tensor>& w) { return sum(w[0] * constant(w[0].graph(), slope)); };
  return p;
}

TEST(Adamw8bit, MomentsGetTheNearestOfTheMapsNumbers) {
  constexpr int64_t kBlocks = 16;
  HostArray slope(Shape{DType::f32, {kBlocks * kScaleBlock}});
  auto v = slope.mutable_view<float>();
  for (size_t i = 0; i < v.size(); ++i) {  // values of all magnitudes; in every other block near the largest
    const double part = std::fmod(0.618034 * static_cast<double>(i), 1), sign = i % 3 == 0 ? -1 : 1;
    v[i] = static_cast<float>(sign * (i / kScaleBlock % 2 == 0 ? std::pow(10, -8 * part) : 1 - 0.03 * part));
    if (i % kScaleBlock == 7) v[i] = 1;
  }
  for (const bool kernel : {false, true}) {
    SmallTraining training(one_device(), config_for("adamw8bit"), slope_of(slope), kernel);
    const SmallState state = training.run(training.start({slope}), 0, 1);
    for (const bool first : {true, false}) {
      const auto codes = state.at(first ? "adamw8bit_m/p0" : "adamw8bit_v/p0").view<uint8_t>();
      const auto& map = dynamic_map(first);
      int compared = 0;
      for (size_t i = 0; i < v.size(); ++i) {
        const double x = first ? v[i] : static_cast<double>(v[i]) * v[i];
        std::array<double, 256> far;
        std::ranges::transform(map, far.begin(), [x](float number) { return std::abs(number - x); });
        const auto nearest = std::ranges::min_element(far);
        if (std::ranges::count_if(far, [&](double d) { return d < *nearest + 1e-6 * std::abs(x); }) > 1) continue;
        EXPECT_EQ(codes[i], nearest - far.begin()) << x << (kernel ? ", kernel" : ", statements");
        ++compared;
      }
      EXPECT_GT(compared, 4000);
    }
  }
}

TEST(ScheduleFree, WeighsUpdatesByTheLargestRateSoFar) {
  OptimConfig config = config_for("schedule_free_adamw");
  config.lr_scheduler = "linear";
  config.warmup_steps_fraction = 0;
  config.max_train_steps = 10;
  const HostArray slope = HostArray::of<float>({DType::f32, {2}}, std::vector<float>{1, -2});
  SmallTraining training(one_device(), config, slope_of(slope));
  const SmallState state = training.run(training.start({slope}), 0, 5);  // the last step's rate is 6e-3
  EXPECT_NEAR(state.at("schedule_free_largest_rate/all").to_doubles()[0], 1e-2, 1e-8);
  EXPECT_NEAR(state.at("schedule_free_weights/all").to_doubles()[0], 5e-4, 1e-9);
}

// ---- every registered optimizer

/// A network with weights sharded over a mesh, and a stack of two layers' weights.
SmallProblem split_network() {
  SmallProblem p;
  p.params = {{{16, 8}, {axis::kMlp, axis::kEmbed}},
              {{16}, {axis::kMlp}},
              {{8, 16}, {axis::kEmbed, axis::kMlp}},
              {{8}, {axis::kEmbed}},
              {{2, 8, 8}, {"", axis::kEmbed, axis::kHeads}, 2},
              {{2, 8}, {"", axis::kEmbed}, 2}};
  p.loss = [](const std::vector<Tensor>& w) {
    Graph& g = w[0].graph();
    const Tensor index = cast(iota(g, {DType::s32, {24, 8}}, 0) * 8 + iota(g, {DType::s32, {24, 8}}, 1), DType::f32);
    Tensor x = sin(index * 1.7);
    for (int64_t layer = 0; layer < 2; ++layer) {
      auto of_layer = [&](Tensor all) { return squeeze(slice_axis(all, 0, layer, layer + 1), 0); };
      x = x + tanh(dot(x, of_layer(w[4]), {.lhs_contract = {1}, .rhs_contract = {1}}) + of_layer(w[5]));
    }
    return network_error(w, x, cos(index * 0.9));
  };
  return p;
}

std::vector<HostArray> start_of(const SmallProblem& problem) {
  std::vector<HostArray> out;
  for (const ParamForm& p : problem.params) {
    HostArray a(Shape{DType::f32, p.dims});
    auto v = a.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = 0.3f * std::sin(1.3f * static_cast<float>(i + 7 * out.size()));
    out.push_back(a);
  }
  return out;
}

/// The largest difference relative to the largest element.
double difference(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double worst = 0, largest = 1e-30;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, std::abs(x[i] - y[i]));
    largest = std::max(largest, std::abs(y[i]));
  }
  return worst / largest;
}

class Registered : public testing::TestWithParam<std::string> {
 protected:
  const OptimConfig config_ = config_for(GetParam());
  const SmallProblem problem_ = split_network();
};

class WithKernel : public Registered {};  // those in kWithKernel

// Each of eight devices holds a part of the state and of the weights; sums over devices have another order. A later
// update needs only the state.
TEST_P(Registered, EightDevicesDoAsOneWhichContinuesFromItsStateToTheBit) {
  static const Devices eight = Devices::open("cpu", 8, {.ici_fsdp_parallelism = 4, .ici_tensor_parallelism = 2});
  SmallTraining one(one_device(), config_, problem_), split(eight, config_, problem_);
  const SmallState start = one.start(start_of(problem_)), expected = one.run(start, 0, 3),
                   found = split.run(start, 0, 3);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, a] : expected) EXPECT_LT(difference(found.at(name), a), 1e-4) << name;
  EXPECT_EQ(split.bytes_per_device().at("p0") * 8, one.bytes_per_device().at("p0"));
  for (const StateSlot& slot : one.optimizer().slots()) {
    const auto array = slot.array(problem_.params[0]);
    if (!array || std::ranges::count(array->axes, "") > 0 || array->axes.size() < 2) continue;
    EXPECT_EQ(split.bytes_per_device().at(slot.prefix + std::string("p0")) * 8,
              one.bytes_per_device().at(slot.prefix + std::string("p0")))
        << slot.prefix;
  }

  const SmallState whole = one.run(start, 0, 6), resumed = one.run(expected, 3, 6);
  for (const auto& [name, a] : whole) {
    ASSERT_EQ(a.bytes(), resumed.at(name).bytes());
    EXPECT_EQ(0, std::memcmp(a.data(), resumed.at(name).data(), a.bytes())) << name;
  }
  EXPECT_LT(one.run(whole, 6, 30).at("loss").to_doubles()[0], whole.at("loss").to_doubles()[0]);

  // A gradient that is not finite changes nothing.
  SmallState poisoned = expected;
  poisoned.at("p3").mutable_view<float>()[2] = NAN;
  for (const auto& [name, a] : one.run(poisoned, 3, 5)) {
    if (name == "loss") continue;
    EXPECT_EQ(0, std::memcmp(a.data(), poisoned.at(name).data(), a.bytes())) << name;
  }
}

// Kernels clip and scale gradients themselves; the statements receive clipped ones.
TEST_P(Registered, KernelsClipGradientsAsStatementsDo) {
  OptimConfig config = config_;
  config.max_grad_value = 2e-3;
  config.max_grad_norm = 1e-2;
  SmallTraining by_kernel(one_device(), config, problem_), by_statements(one_device(), config, problem_, false);
  const SmallState start = by_kernel.start(start_of(problem_)), expected = by_statements.run(start, 0, 4);
  for (const auto& [name, a] : by_kernel.run(start, 0, 4)) {
    if (a.dtype() == DType::u8) continue;  // values between two codes may get either
    EXPECT_LT(difference(a, expected.at(name)), 1e-4) << name;
  }
}

// Matrices and vectors that several threads share, stacks of them, and convolutions: of 3 × 3 and of one pixel.
TEST_P(WithKernel, UpdatesLargeArraysAsStatementsDo) {
  SmallProblem problem;
  problem.params = {{{300, 260}, {}}, {{2, 150, 500}, {}, 2}, {{64, 70, 3, 3}, {}}, {{90, 80, 1, 1}, {}},
                    {{70'001}, {}},   {{2, 40'000}, {}, 2},   {{3}, {}, 3},         {{}, {}}};
  problem.loss = [](const std::vector<Tensor>& params) {
    Tensor total;
    for (const Tensor p : params) {
      const Tensor far = p * 1.5 + 0.1, part = sum(square(square(far)) + far);
      total = total ? total + part : part;
    }
    return total;
  };
  OptimConfig config = config_;
  config.learning_rate = 1e-3;
  SmallTraining by_kernel(one_device(), config, problem, true, true),
      by_statements(one_device(), config, problem, false, true);
  const SmallState start = by_kernel.start(start_of(problem)), expected = by_statements.run(start, 0, 3),
                   found = by_kernel.run(start, 0, 3);
  for (const auto& [name, a] : found) {
    if (a.dtype() == DType::u8) continue;  // as above
    EXPECT_LT(difference(a, expected.at(name)), GetParam() == "adamw8bit" ? 5e-4 : 2e-5) << name;
  }
  for (const auto& [name, a] : by_kernel.run(start, 0, 3))
    EXPECT_EQ(0, std::memcmp(a.data(), found.at(name).data(), a.bytes())) << name;
}

// Layers of a stack are updated as separate weights.
TEST_P(Registered, TrainsLayersOfAStackOneByOne) {
  SmallProblem stacks, layers;
  stacks.params = {{{2, 8, 40}, {}, 2}, {{2, 8}, {}, 2}};
  const std::vector<HostArray> starts = start_of(stacks);
  std::vector<HostArray> parts;
  auto loss_of = [](const std::vector<Tensor>& w) {  // of two matrices and two vectors
    Graph& g = w[0].graph();
    const Tensor x = sin(cast(iota(g, {DType::s32, {4, 40}}, 1), DType::f32) * 0.7 + 1.0);
    Tensor error;
    for (size_t i = 0; i < 2; ++i) {
      const Tensor y = tanh(dot(x, w[i], {.lhs_contract = {1}, .rhs_contract = {1}}) + w[2 + i]) - 0.5;
      error = error ? error + sum(square(y)) * 3.0 : sum(square(y));
    }
    return error;
  };
  stacks.loss = [&](const std::vector<Tensor>& p) {
    auto layer = [](Tensor all, int64_t i) { return squeeze(slice_axis(all, 0, i, i + 1), 0); };
    return loss_of({layer(p[0], 0), layer(p[0], 1), layer(p[1], 0), layer(p[1], 1)});
  };
  for (size_t i = 0; i < 2; ++i)
    for (int64_t layer = 0; layer < 2; ++layer) {
      const Shape shape{DType::f32, Dims(stacks.params[i].dims.begin() + 1, stacks.params[i].dims.end())};
      parts.push_back(HostArray(shape, starts[i].owner(),
                                starts[i].data() + static_cast<size_t>(layer) * static_cast<size_t>(shape.bytes())));
      layers.params.push_back({shape.dims, {}});
    }
  layers.loss = loss_of;
  SmallTraining together(one_device(), config_, stacks), apart(one_device(), config_, layers);
  const SmallState all = together.run(together.start(starts), 0, 3), each = apart.run(apart.start(parts), 0, 3);
  for (const auto& [stack, layer] : {std::pair("p0", "p1"), {"p1", "p3"}}) {
    const HostArray &of_stack = all.at(stack), &second = each.at(layer);
    EXPECT_LT(difference(HostArray(second.shape(), of_stack.owner(), of_stack.data() + second.bytes()), second), 1e-5)
        << stack;
  }
}

/// A value other than the argument's default.
std::string another(const OptimizerArgument& a) {
  struct Change {
    const OptimizerArgument& a;
    std::string operator()(bool v) const { return v ? "False" : "True"; }
    std::string operator()(double v) const {
      if (!std::isfinite(v)) return "1.5";
      for (const double tried : {v * 0.5, v * 0.5 + 0.3, v + 3, v - 0.5})
        if (tried != v && (!a.range || a.range->contains(tried))) return fmt::format("{}", tried);
      return "";
    }
    std::string operator()(const std::optional<double>& v) const { return (*this)(v.value_or(0.2)); }
    std::string operator()(const std::vector<double>& v) const {
      std::string out;
      for (const double x : v) out += (out.empty() ? "" : ",") + (*this)(x);
      return out;
    }
    std::string operator()(const std::string& v) const {
      for (const std::string& word : a.words)
        if (word != v) return word;
      return "";
    }
  };
  return std::visit(Change{a}, a.value);
}

TEST_P(Registered, EveryArgumentChangesTheUpdateAndNothingElseIsAnArgument) {
  const OptimConfig plain = config_for(GetParam());
  const std::vector<OptimizerArgument> arguments = optimizer_arguments(GetParam());
  ASSERT_FALSE(arguments.empty());
  for (const OptimizerArgument& a : arguments) {
    OptimConfig changed = plain;
    changed.optimizer_args = {a.name + "=" + another(a)};
    EXPECT_NE(make_optimizer(changed)->full_name(), make_optimizer(plain)->full_name()) << changed.optimizer_args[0];
    changed.optimizer_args = {a.name + "=much"};
    EXPECT_THROW(make_optimizer(changed), Error) << a.name;
  }
  OptimConfig unknown = plain;
  unknown.optimizer_args = {"momentums=1"};
  try {
    make_optimizer(unknown);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("optimizer=" + GetParam() + " has no argument 'momentums'; expected one"));
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Registered, testing::ValuesIn(optimizer_names()),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Optimizers, WithKernel,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kWithKernel), std::end(kWithKernel))),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace md
