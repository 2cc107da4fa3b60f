// Resuming equals not interrupting, bit for bit: 2N steps compared with N, all objects recreated, and N more.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/batches/aspect_bucket_batches.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/run/run_lock.h"
#include "maxdiffusion/tasks/denoise.h"
#include "maxdiffusion/train/loop.h"
#include "tests/resume/training.h"

namespace md {
namespace {

/// The position of a dataset of `samples` at which a run continues that was saved at `at`, and what is logged.
std::pair<Position, std::string> resumed(int64_t samples, const DataIdentity& now, const Position& at,
                                         const DataIdentity& then) {
  const std::unique_ptr<Dataset> data = in_memory({{"x", HostArray(Shape{DType::f32, {samples, 2}})}}, 1, 0);
  testing::internal::CaptureStderr();
  resume_data(*data, now, at, then, "runs/r/checkpoints/4");
  return {data->position(), testing::internal::GetCapturedStderr()};
}

TEST(Resume, ContinuesWithTheDataThatIsThereAndSaysWhatChanged) {
  const DataIdentity then{.samples = 5, .names = "a", .captions = "b"};
  const Position at{.index = 4}, next{.epoch = 1};
  const std::string changed = "the data has changed since checkpoint runs/r/checkpoints/4: ";
  struct Case {
    int64_t samples;
    DataIdentity now;
    Position expected;
    std::string log;
  };
  for (const auto& [samples, now, expected, log] : std::vector<Case>{
           {5, then, at, ""},
           {5, {}, at, ""},  // data whose identity is not known
           {3, {3, "c", "d"}, next, "it had 5 samples and has 3; training continues at the beginning of epoch 1"},
           {7, {7, "c", "d"}, at, "it had 5 samples and has 7; training continues at position 4 of epoch 0"},
           {5, {5, "c", "b"}, at, "its 5 samples have other names; training continues at position 4 of epoch 0"},
           {5, {5, "a", "d"}, at, "its 5 samples have other captions; training continues at position 4 of epoch 0"},
           {5, {5, "", "", "f"}, at, "it is data of another kind; training continues at position 4 of epoch 0"}}) {
    const auto [position, found] = resumed(samples, now, at, then);
    EXPECT_EQ(position, expected) << log;
    if (log.empty())
      EXPECT_EQ(found, "");
    else
      EXPECT_NE(found.find(changed + log), std::string::npos) << found;
  }
  // A checkpoint of a version that did not record its data.
  const auto [position, found] = resumed(3, {3, "c", "d"}, at, {});
  EXPECT_EQ(position, next);
  EXPECT_NE(found.find("the data has no position 4 of epoch 0, at which checkpoint runs/r/checkpoints/4 was saved; "
                       "training continues at the beginning of epoch 1"),
            std::string::npos)
      << found;
  // A place in a file of many records is not used in another file.
  const auto [in_file, other] =
      resumed(9, {.files = "e"}, {.epoch = 2, .index = 4, .offset = 512, .consumed = 1}, {.files = "a"});
  EXPECT_EQ(in_file, (Position{.epoch = 3}));
  EXPECT_NE(other.find(changed + "the files of its samples have other names or sizes; training continues at the "
                                 "beginning of epoch 3"),
            std::string::npos)
      << other;
}

// S2-37
TEST(Resume, WithoutSavedMomentsStartsFreshOnes) {
  for (double ema : {0.0, 0.9}) {
    TinyRun saved, bare;
    saved.options.step.ema_decay = bare.options.step.ema_decay = ema;
    bare.options.keys.save_optimizer = false;
    saved.train(4);
    bare.train(4);
    HostArrays with = as_arrays(read_training_state(saved.options.checkpoint_dir(), 4).state),
               without = as_arrays(read_training_state(bare.options.checkpoint_dir(), 4).state);
    EXPECT_GT(std::erase_if(with, [](const auto& a) { return a.first.starts_with("adam_"); }), 0u);
    expect_same_bits(with, without);  // nothing else is missing

    testing::internal::CaptureStderr();
    bare.options.keys.save_optimizer = true;
    bare.train(6);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find("has no moments of the optimizer"), std::string::npos) << log;
    saved.train(6);
    EXPECT_EQ(bare.metric("loss").size(), 6u);
    EXPECT_EQ(bare.metric("loss")[4], saved.metric("loss")[4]);  // the same weights, step and data
    EXPECT_NE(bare.metric("loss")[5], saved.metric("loss")[5]);
    EXPECT_EQ(bare.metric("learning_rate"), saved.metric("learning_rate"));
  }
}

TEST(Resume, SaysThatMomentsAreNotSavedOnlyOfOptimizersThatHaveThem) {
  for (const double momentum : {0.9, 0.0}) {
    TinyRun run;
    run.options.keys.save_optimizer = false;
    run.options.step.optim.optimizer = "sgd";
    run.options.step.optim.optimizer_arg<double>("sgd_momentum") = momentum;
    testing::internal::CaptureStderr();
    run.train(1);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("checkpoints have no moments") != log.npos, momentum > 0) << log;
  }
}

TEST(Resume, WithAnotherOptimizerIsRefusedWhereThereIsStateOfTheFirst) {
  TinyRun run;
  run.train(2);
  run.options.step.optim.optimizer = "sgd";
  try {
    run.train(4);
    FAIL();
  } catch (const Error& e) {
    const std::string message = e.what();
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(message.find("optimizer is 'sgd', but checkpoint "), message.npos) << message;
    EXPECT_NE(message.find(" holds the state of 'adamw', such as 'adam_m/unet/"), message.npos) << message;
    EXPECT_NE(message.find("try: optimizer=adamw, or another run_name"), message.npos) << message;
  }
  // Switches optimizers from a checkpoint without moments (save_optimizer=false), in both directions.
  for (const char* optimizer : {"sgd", "adamw"}) {
    TinyRun other;
    other.options.keys.save_optimizer = false;
    other.options.step.optim.optimizer = std::string(optimizer) == "sgd" ? "adamw" : "sgd";
    other.train(2);
    other.options.step.optim.optimizer = optimizer;
    other.options.keys.save_optimizer = true;
    testing::internal::CaptureStderr();
    other.train(3);
    EXPECT_NE(testing::internal::GetCapturedStderr().find("has no moments of the optimizer"), std::string::npos);
    const HostArrays state = as_arrays(read_training_state(other.options.checkpoint_dir(), 3).state);
    for (const char* prefix : {"adam_m/", "adam_v/", "sgd_momentum/"})
      EXPECT_EQ(std::ranges::any_of(state, [&](const auto& a) { return a.first.starts_with(prefix); }),
                std::string(prefix).starts_with(std::string(optimizer).substr(0, 3)))
          << optimizer << " " << prefix;
  }
}

TEST(Resume, ThatWouldDropTheAveragesIsRefused) {
  TinyRun run;
  run.train(2);
  run.options.step.ema_decay = 0;
  try {
    run.train(3);
    FAIL();
  } catch (const Error& e) {
    const std::string message = e.what(), checkpoint = run.options.checkpoint_dir() + "/2";
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(message.find("checkpoint " + checkpoint + " holds moving averages, such as 'ema/unet/"), message.npos)
        << message;
    EXPECT_NE(message.find("ema_decay is 0"), message.npos) << message;
    EXPECT_NE(message.find("pretrained_model_name_or_path=" + checkpoint), message.npos) << message;
  }
  EXPECT_EQ(checkpoint_folders(run.options.checkpoint_dir()), (std::vector<int64_t>{2}));
}

TEST(Resume, SaysWhichMomentsAreMissing) {
  TinyRun run;
  run.options.step.frozen = {"conv_in"};
  run.train(2);
  run.options.step.frozen.clear();
  testing::internal::CaptureStderr();
  run.train(3);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(" lacks 4 of the "), log.npos) << log;  // two moments of a weight and a bias
  EXPECT_NE(log.find(", such as 'adam_m/unet/conv_in.bias': they start again"), log.npos) << log;
  EXPECT_EQ(log.find("save_optimizer"), log.npos) << log;
}

// S4-101, S4-102, P-6
TEST(Resume, EqualsNoInterruptionBitForBit) {
  for (const auto& [optimizer, ema] : {std::pair("adamw", 0.0), {"adamw", 0.9}, {"sgd", 0.9}}) {
    TinyRun whole, parts;
    whole.options.step.optim.optimizer = parts.options.step.optim.optimizer = optimizer;
    whole.options.step.ema_decay = parts.options.step.ema_decay = ema;
    Trained expected = whole.train(8);
    Trained half = parts.train(4);
    Trained resumed = parts.train(8);
    expect_same_bits(expected.values, resumed.values);
    bool moved = false;
    for (const auto& [name, x] : half.values)
      moved |= std::memcmp(x.data(), resumed.values.at(name).data(), x.bytes()) != 0;
    EXPECT_TRUE(moved);
    CheckpointContent a = read_training_state(whole.options.checkpoint_dir(), 8),
                      b = read_training_state(parts.options.checkpoint_dir(), 8);
    expect_same_bits(as_arrays(a.state), as_arrays(b.state));
    EXPECT_EQ(a.state_json, b.state_json);
    EXPECT_EQ(parse_json(a.state_json).at("maxdiffusion_version"), version());
  }
}

/// A model of two layers, which compiles quickly.
class SmallTask final : public Task {
 public:
  std::string model() const override { return "unet"; }
  std::vector<BatchField> batch() const override { return {{"x", {DType::f32, {4, 6}}}}; }
  Tensor loss(const Models& models, const Feed& feed, Rng rng) const override {
    const Scope s = models("unet");
    const Tensor x = feed.at("x") + random_normal(rng.for_("noise"), {DType::f32, {4, 6}}) * 0.1;
    const Tensor h = tanh(nn::linear(s / "down", x, {.out = 50}));
    return mean(square(nn::linear(s / "up", h, {.out = 6}) - x));
  }
};

LoopOptions options_in(const TemporaryFolder& folder) {
  LoopOptions o;
  o.title = "test";
  o.folder = folder.path();
  o.compile.xla_flags = "--xla_backend_optimization_level=0";
  o.step.optim.lr_scheduler = "constant";
  return o;
}

class EachOptimizer : public testing::TestWithParam<std::string> {};

TEST_P(EachOptimizer, ResumesToTheBitAndItsStateMoves) {
  auto train = [](const TemporaryFolder& folder, int64_t steps) {
    static const Devices devices = Devices::open();
    LoopOptions o = options_in(folder);
    o.step.optim.optimizer = GetParam();
    o.step.optim.learning_rate = 1e-2;
    o.step.optim.max_train_steps = steps;
    o.step.ema_decay = 0.9;
    for (const OptimizerArgument& a : optimizer_arguments(GetParam()))
      if (a.name == "min_8bit_size") o.step.optim.optimizer_args = {"min_8bit_size=100"};
    o.initial = initial_values;
    const SmallTask task;
    train_loop(devices, {&task}, in_memory({{"x", noise({DType::f32, {11, 6}}, "x")}}, 4, 5), o);
    return as_arrays(read_training_state(o.checkpoint_dir(), steps).state);
  };
  const TemporaryFolder whole, parts;
  const HostArrays expected = train(whole, 4), half = train(parts, 2), resumed = train(parts, 4);
  expect_same_bits(expected, resumed);
  OptimConfig config;
  config.optimizer = GetParam();
  for (const auto& [name, a] : expected)  // every moving average changed
    if (name.starts_with(state_prefix::kAverage)) {
      EXPECT_NE(0, std::memcmp(a.data(), half.at(name).data(), a.bytes())) << name;
    }
  for (const StateSlot& slot : make_optimizer(config)->slots()) {
    bool some = false, moved = false;
    for (const auto& [name, a] : expected) {
      if (!name.starts_with(slot.prefix)) continue;
      some = true;
      moved |= std::memcmp(a.data(), half.at(name).data(), a.bytes()) != 0;
    }
    EXPECT_TRUE(moved || !some || slot.prefix == std::string("prodigy_start/")) << slot.prefix;
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, EachOptimizer, testing::ValuesIn(optimizer_names()),
                         [](const auto& info) { return info.param; });

/// Two blocks that may be stacked.
class TwoBlocks final : public Task {
 public:
  std::string model() const override { return "unet"; }
  std::vector<BatchField> batch() const override { return {{"x", {DType::f32, {4, 6}}}}; }
  Tensor loss(const Models& models, const Feed& feed, Rng) const override {
    const Tensor x = feed.at("x");
    return mean(
        square(nn::repeat(models("unet") / "blocks", 2, x,
                          [](const Scope& s, Tensor h) { return h + tanh(nn::linear(s / "a", h, {.out = 6})); }) -
               1.0));
  }
};

/// Two blocks of two streams: the loss does not depend on the second stream of the last block, and not on `unread`.
class PartlyRead final : public Task {
 public:
  std::string model() const override { return "unet"; }
  std::vector<BatchField> batch() const override { return {{"x", {DType::f32, {4, 6}}}}; }
  Tensor loss(const Models& models, const Feed& feed, Rng) const override {
    const Scope s = models("unet");
    nn::linear(s / "unread", feed.at("x"), {.out = 6});
    const auto block = [](const Scope& b, const std::vector<Tensor>& streams) -> std::vector<Tensor> {
      const Tensor both = streams[0] + streams[1];
      return {streams[0] + tanh(nn::linear(b / "first", both, {.out = 6})),
              streams[1] + tanh(nn::linear(b / "second", both, {.out = 6}))};
    };
    return mean(square(nn::repeat(s / "blocks", 2, {feed.at("x"), feed.at("x")}, block)[0] - 1.0));
  }
};

/// Positive numbers at which tanh has a gradient.
HostArray small(const Shape& shape) {
  HostArray a = noise(shape, "weights");
  for (float& v : a.mutable_view<float>()) v *= 0.05f;
  return a;
}

// As in PyTorch, whose optimizers pass over parameters without a gradient.
TEST_P(EachOptimizer, LeavesParametersAloneOnWhichTheLossDoesNotDepend) {
  for (const auto& [stacked, accumulation, ema] :
       {std::tuple(false, 1, 0.0), {true, 1, 0.9}, {false, 2, 0.9}, {true, 2, 0.0}}) {
    SCOPED_TRACE(fmt::format("stacked {} accumulation {}", stacked, accumulation));
    const TemporaryFolder folder;
    static const Devices devices = Devices::open();
    LoopOptions o = options_in(folder);
    o.step.scope.scan_layers = stacked;
    o.step.accumulation = accumulation;
    o.step.optim.optimizer = GetParam();
    o.step.optim.learning_rate = 1e-2;
    o.step.optim.max_train_steps = 3;
    o.step.ema_decay = ema;
    for (const OptimizerArgument& a : optimizer_arguments(GetParam()))
      if (a.name == "weight_decay") o.step.optim.optimizer_args = {"weight_decay=0.5"};
    o.initial = [](const ParamTable& params) {
      return [&params] {
        NamedShards values;
        for (const Param& p : params.params()) values[p.input] = small(p.shape);
        return values;
      };
    };
    const PartlyRead task;
    const HostArrays values =
        train_loop(devices, {&task}, in_memory({{"x", noise({DType::f32, {11, 6}}, "x")}}, 4 * accumulation, 5), o)
            .values;
    int unmoved = 0, moved = 0;
    for (const auto& [name, a] : values) {
      const std::vector<double> now = a.to_doubles(), before = small(a.shape()).to_doubles();
      const size_t layers = name.find(".*.") != name.npos ? 2 : 1, size = now.size() / layers;
      for (size_t layer = 0; layer < layers; ++layer) {
        const bool same = std::equal(now.begin() + static_cast<std::ptrdiff_t>(layer * size),
                                     now.begin() + static_cast<std::ptrdiff_t>((layer + 1) * size),
                                     before.begin() + static_cast<std::ptrdiff_t>(layer * size));
        const bool last = layers == 2 ? layer == 1 : name.find("blocks.1.") != name.npos;
        const bool unread = name.find("/unread") != name.npos || (last && name.find(".second.") != name.npos);
        EXPECT_EQ(same, unread) << name << " layer " << layer;
        ++(unread ? unmoved : moved);
      }
    }
    EXPECT_EQ(unmoved, 4);  // weight and bias of each
    EXPECT_EQ(moved, 6);
  }
}

TEST(Muon, MakesEveryLayerOfAStackOrthogonal) {
  auto train = [](bool stacked) {
    const TemporaryFolder folder;
    const Devices devices = Devices::open();
    LoopOptions o = options_in(folder);
    o.step.scope.scan_layers = stacked;
    o.step.optim.optimizer = "muon";
    o.step.optim.learning_rate = 1e-2;
    o.step.optim.max_train_steps = 3;
    o.initial = initial_values;
    const TwoBlocks task;
    return train_loop(devices, {&task}, in_memory({{"x", noise({DType::f32, {11, 6}}, "x")}}, 4, 5), o).values;
  };
  const HostArrays stacks = train(true), layers = train(false);
  for (const char* name : {"a.weight", "a.bias"}) {
    std::vector<double> both = layers.at("unet/blocks.0." + std::string(name)).to_doubles();
    std::ranges::copy(layers.at("unet/blocks.1." + std::string(name)).to_doubles(), std::back_inserter(both));
    const std::vector<double> stack = stacks.at("unet/blocks.*." + std::string(name)).to_doubles();
    ASSERT_EQ(stack.size(), both.size());
    for (size_t i = 0; i < both.size(); ++i) EXPECT_NEAR(stack[i], both[i], 1e-5) << name << ' ' << i;
  }
}

// A run goes on with its weights and all moments where scan_layers was another.
TEST(Resume, WithLayersStackedOtherwise) {
  for (const char* optimizer : {"adamw", "adamw8bit", "adafactor"})
    for (const bool stacked : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {}", optimizer, stacked));
      const TemporaryFolder folder;
      const Devices devices = Devices::open();
      const TwoBlocks task;
      const auto train = [&](bool as_stack, int64_t steps) {
        LoopOptions o = options_in(folder);
        o.step.scope.scan_layers = as_stack;
        o.step.optim.optimizer = optimizer;
        o.step.optim.learning_rate = 1e-2;
        o.step.optim.max_train_steps = steps;
        o.initial = initial_values;
        train_loop(devices, {&task}, in_memory({{"x", noise({DType::f32, {11, 6}}, "x")}}, 4, 5), o);
        return as_arrays(read_training_state(o.checkpoint_dir(), steps).state);
      };
      /// The bytes of an array of the training state for both layers, one after the other.
      const auto layers = [](const HostArrays& state, const std::string& prefix, const std::string& name) {
        std::string bytes;
        const auto append = [&](const HostArray& a) {
          bytes.append(reinterpret_cast<const char*>(a.data()), a.bytes());
        };
        if (const auto stack = state.find(prefix + "unet/blocks.*." + name); stack != state.end()) {
          append(stack->second);
          return bytes;
        }
        append(state.at(prefix + "unet/blocks.0." + name));
        append(state.at(prefix + "unet/blocks.1." + name));
        return bytes;
      };
      const HostArrays before = train(stacked, 3);
      const HostArrays after = train(!stacked, 4);
      std::filesystem::remove_all(options_in(folder).checkpoint_dir() + "/4");
      const HostArrays whole = train(stacked, 4);
      int compared = 0;
      OptimConfig config;
      config.optimizer = optimizer;
      for (const StateSlot& slot : optimizer_slots(config))
        for (const char* name : {"a.weight", "a.bias"}) {
          if (!before.contains(slot.prefix + ("unet/blocks." + std::string(stacked ? "*." : "0.") + name))) continue;
          ++compared;
          EXPECT_NE(layers(before, slot.prefix, name), layers(whole, slot.prefix, name)) << slot.prefix << name;
          EXPECT_EQ(layers(after, slot.prefix, name), layers(whole, slot.prefix, name)) << slot.prefix << name;
        }
      EXPECT_GE(compared, 2);
    }
}

/// Two vectors; the loss is the sum of half their squared norms.
class TwoVectors final : public Task {
 public:
  std::string model() const override { return "unet"; }
  std::vector<BatchField> batch() const override { return {{"x", {DType::f32, {4, 6}}}}; }
  Tensor loss(const Models& models, const Feed& feed, Rng) const override {
    const Scope s = models("unet");
    const Tensor a = s.param("a", {3}, {}, init::normal(1)), b = s.param("b", {3}, {}, init::normal(1));
    return (sum(square(a)) + sum(square(b))) * 0.5 + sum(feed.at("x")) * 0.0;
  }
};

// a's gradients are taken at the point between its average and the other sequence; b is frozen.
TEST(ScheduleFree, TrainsAtThePointBetweenAndNothingFrozen) {
  constexpr double kRate = 0.1, kNear = 0.6, kSquares = 0.99;
  const TemporaryFolder folder;
  const Devices devices = Devices::open();
  LoopOptions o = options_in(folder);
  o.step.optim.optimizer = "schedule_free_adamw";
  o.step.optim.optimizer_args = {"betas=0.6,0.99"};
  o.step.optim.learning_rate = kRate;
  o.step.optim.max_grad_norm = o.step.optim.max_grad_value = 0;
  o.step.optim.max_train_steps = 5;
  o.step.ema_decay = 0;
  o.step.frozen = {"/b$"};
  std::vector<double> a, b;
  o.initial = [&](const ParamTable& params) {
    return [&] {
      NamedShards v;
      for (const Param& p : params.params()) {
        const HostArray start = initial_value(p, 3);
        (p.path == "a" ? a : b) = start.to_doubles();
        v[p.input] = start;
      }
      return v;
    };
  };
  const TwoVectors task;
  const HostArrays values =
      train_loop(devices, {&task}, in_memory({{"x", noise({DType::f32, {11, 6}}, "x")}}, 4, 5), o).values;
  const HostArrays state = as_arrays(read_training_state(o.checkpoint_dir(), 5).state);
  EXPECT_EQ(values.at("unet/b").to_doubles(), b);
  for (const auto& [name, array] : state) EXPECT_FALSE(name.ends_with("/unet/b")) << name;
  const std::vector<double> found = values.at("unet/a").to_doubles(),
                            found_z = state.at("schedule_free_z/unet/a").to_doubles();
  for (size_t i = 0; i < a.size(); ++i) {
    double x = a[i], z = a[i], v = 0;
    for (int n = 1; n <= 5; ++n) {
      const double g = kNear * x + (1 - kNear) * z;
      v = kSquares * v + (1 - kSquares) * g * g;
      z -= kRate * g / (std::sqrt(v / (1 - std::pow(kSquares, n))) + 1e-8);
      x += (z - x) / n;
    }
    EXPECT_NEAR(found[i], x, 1e-5);
    EXPECT_NEAR(found_z[i], z, 1e-5);
  }
}

TEST(Rates, ByNameAndOfLorasSecondMatrices) {
  auto moved = [](const std::function<void(StepOptions&)>& change) {
    TinyRun run;
    run.options.step.optim.lr_scheduler = "constant";
    run.options.step.optim.optimizer = "sgd";
    run.options.step.ema_decay = 0;
    run.options.step.change_scope = [](const std::string&, const Scope& s) {
      return lora_scope(s, {.rank = 2, .alpha = 2, .targets = {"to_q", "to_k"}});
    };
    change(run.options.step);
    std::map<std::string, double> distance;
    const HostArrays from = run.train(0).values, to = run.train(1).values;
    for (const auto& [name, a] : to) {
      const std::vector<double> x = from.at(name).to_doubles(), y = a.to_doubles();
      for (size_t i = 0; i < x.size(); ++i) distance[name] = std::max(distance[name], std::abs(y[i] - x[i]));
    }
    return distance;
  };
  const auto plain = moved([](StepOptions&) {});
  const auto changed = moved([](StepOptions& o) {
    o.loraplus_ratio = 4;
    o.rates_by_name = {{"down_blocks\\..*to_q", 3e-3}, {"to_q", 0}};
    o.frozen = {"up_blocks.*to_k"};
  });
  int of_each[4] = {};
  for (const auto& [name, distance] : plain) {
    double factor = name.ends_with("lora_B.weight") ? 4 : 1;
    if (name.find("to_q") != name.npos) factor *= name.find("down_blocks.") != name.npos ? 3 : 0;
    if (name.find("up_blocks") != name.npos && name.find("to_k") != name.npos) factor = 0;
    EXPECT_NEAR(changed.at(name), distance * factor, 1e-3 * distance * factor) << name;
    if (distance > 0) ++of_each[factor == 0 ? 0 : factor == 4 ? 1 : factor == 12 ? 2 : 3];
  }
  for (int i = 0; i < 3; ++i) EXPECT_GT(of_each[i], 0) << i;
  for (const std::vector<std::string>& frozen : {std::vector<std::string>{"to_v"}, {"lora"}}) {
    try {
      moved([&](StepOptions& o) { o.frozen = frozen; });
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_NE(std::string(e.what()).find("frozen_layers"), std::string::npos) << e.what();
    }
  }
  // Optimizers that estimate their rate, or have one rate for a whole component.
  for (const auto& [optimizer, changed_rate] : std::map<std::string, std::function<void(StepOptions&)>>{
           {"adafactor", [](StepOptions& o) { o.loraplus_ratio = 4; }},
           {"prodigy",
            [](StepOptions& o) {
              o.rates_by_name = {{"to_q", 3e-3}};
            }},
           {"schedule_free_adamw", [](StepOptions& o) { o.loraplus_ratio = 4; }}}) {
    try {
      moved([&, name = optimizer, &change = changed_rate](StepOptions& o) { o.optim.optimizer = name, change(o); });
      ADD_FAILURE() << optimizer;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_TRUE(std::string(e.what()).starts_with("optimizer=" + optimizer + " ")) << e.what();
      EXPECT_NE(std::string(e.what()).find("cannot be combined with network_reg_lrs and loraplus_lr_ratio"),
                std::string::npos)
          << e.what();
    }
  }
}

TEST(Averages, AreThoseOfDiffusers) {
  TinyRun run;
  run.options.step.ema_decay = 0.3;
  run.options.keys.checkpoint_every = 4;  // samples: every step
  run.options.keys.checkpoints_to_keep = 0;
  run.train(5);
  const double decays[] = {0, 2.0 / 11, 3.0 / 12, 0.3, 0.3};  // printed by diffusers.training_utils.EMAModel(decay=0.3)
  std::map<std::string, std::vector<double>> averages;
  for (int64_t step = 1; step <= 5; ++step) {
    const HostArrays state = as_arrays(read_training_state(run.options.checkpoint_dir(), step).state);
    int compared = 0;
    for (const auto& [name, a] : state) {
      if (!name.starts_with("ema/")) continue;
      const std::vector<double> found = a.to_doubles(), value = state.at(name.substr(4)).to_doubles();
      std::vector<double>& average = averages[name];
      average.resize(value.size());
      double worst = 0;
      for (size_t i = 0; i < value.size(); ++i) {
        average[i] = value[i] + (average[i] - value[i]) * decays[step - 1];
        worst = std::max(worst, std::abs(average[i] - found[i]));
      }
      EXPECT_LT(worst, 1e-6) << name << " after step " << step;
      ++compared;
    }
    EXPECT_GT(compared, 10);
  }
}

std::set<std::string> kinds_of(const HostArrays& state) {
  std::set<std::string> kinds;
  for (const auto& [name, a] : state) kinds.insert(name.substr(0, name.find('/')));
  return kinds;
}

struct LowPrecisionCase {
  std::string update;
  double ema = 0;
  DType weights = DType::bf16, moments = DType::f32;
};
/// Steps of at most 2e-5, a tenth of half the spacing of bf16 numbers near 0.1.
void set(TinyRun& run, const LowPrecisionCase& c) {
  run.options.step.scope.weights = c.weights;
  run.options.step.optim.low_precision_update = c.update;
  run.options.step.optim.moments_dtype = c.moments == DType::f32 ? "float32" : "bfloat16";
  run.options.step.optim.learning_rate = 2e-5;
  run.options.step.optim.lr_scheduler = "constant";
  run.options.step.ema_decay = c.ema;
}

// P-6
TEST(LowPrecision, ResumedEqualsUninterruptedBitForBit) {
  for (const LowPrecisionCase& c : {LowPrecisionCase{"master_f32"},
                                    {"stochastic_rounding"},
                                    {"master_f32", 0.9},
                                    {"stochastic_rounding", 0, DType::bf16, DType::bf16}}) {
    SCOPED_TRACE(c.update + " " + std::to_string(c.ema));
    TinyRun whole, parts;
    set(whole, c);
    set(parts, c);
    const Trained expected = whole.train(6);
    parts.train(3);
    expect_same_bits(expected.values, parts.train(6).values);
    const HostArrays state = as_arrays(read_training_state(whole.options.checkpoint_dir(), 6).state);
    expect_same_bits(state, as_arrays(read_training_state(parts.options.checkpoint_dir(), 6).state));

    // The state does not repeat the model's weights or master weights; all of it but narrow moments is f32.
    std::set<std::string> kinds = {"step", "healthy", "adam_m", "adam_v"};
    if (c.update == "master_f32") kinds.insert("master");
    if (c.ema > 0) kinds.insert("ema");
    EXPECT_EQ(kinds_of(state), kinds);
    for (const auto& [name, a] : state)
      if (name.find('/') != std::string::npos) {
        EXPECT_EQ(a.dtype(), name.starts_with("adam_") ? c.moments : DType::f32) << name;
      }
    for (const auto& [name, a] : expected.values) {
      EXPECT_EQ(a.dtype(), DType::bf16) << name;
      const auto exact = state.find((c.ema > 0 ? "ema/" : "master/") + name);
      if (exact != state.end()) {
        EXPECT_EQ(a.to_doubles(), exact->second.cast(DType::bf16).to_doubles()) << name;
      }
    }
  }
}

// S0-81, S4-12, P-8
TEST(LowPrecision, SmallUpdatesAddUpUnlessRoundedToNearest) {
  // The movement of the weights between 1/16 and 1/2 relative to the float32 run from the same start.
  auto train = [](const LowPrecisionCase& c, int64_t steps) {
    TinyRun run;
    set(run, c);
    run.options.keys.save_final_checkpoint = false;
    return run.train(steps).values;
  };
  const LowPrecisionCase f32{"master_f32", 0, DType::f32};
  const HostArrays from = train(f32, 0), to = train(f32, 40);
  auto part_of_the_way = [&](const std::string& update) {
    const HostArrays values = train({update}, 40);
    double common = 0, difference = 0;
    for (const auto& [name, array] : values) {
      const std::vector<double> x = array.to_doubles(), x0 = from.at(name).cast(DType::bf16).to_doubles();
      const std::vector<double> y = to.at(name).to_doubles(), y0 = from.at(name).to_doubles();
      for (size_t i = 0; i < x.size(); ++i) {
        if (std::abs(y0[i]) < 1.0 / 16 || std::abs(y0[i]) > 0.5) continue;
        common += (x[i] - x0[i]) * (y[i] - y0[i]);
        difference += (y[i] - y0[i]) * (y[i] - y0[i]);
      }
    }
    return common / difference;
  };
  EXPECT_NEAR(part_of_the_way("master_f32"), 1, 0.1);
  EXPECT_NEAR(part_of_the_way("stochastic_rounding"), 1, 0.1);
  EXPECT_EQ(part_of_the_way("round_to_nearest"), 0);
}

// In step 400 the second moment grows by 1/400 of its value, less than half of bfloat16's spacing of 2^-8: rounding to
// nearest would stop its growth. With stochastic rounding the sum over all weights equals that of float32.
TEST(LowPrecision, MomentsOfBfloat16AddUpAsThoseOfFloat32) {
  const auto second_moments = [](DType moments) {
    TinyRun run;
    set(run, {"master_f32", 0, DType::f32, moments});
    run.options.step.optim.learning_rate = 1e-7;  // both runs get the same gradients
    run.options.step.optim.optimizer_arg<double>("adam_b2") = 0.99999;
    run.train(500);
    std::pair<double, size_t> sum_and_bytes;
    for (const auto& [name, a] : as_arrays(read_training_state(run.options.checkpoint_dir(), 500).state)) {
      if (!name.starts_with("adam_v/")) continue;
      for (const double v : a.to_doubles()) sum_and_bytes.first += v;
      sum_and_bytes.second += a.bytes();
    }
    return sum_and_bytes;
  };
  const auto [exact, whole] = second_moments(DType::f32);
  const auto [sum, half] = second_moments(DType::bf16);
  EXPECT_EQ(2 * half, whole);
  EXPECT_NEAR(sum / exact, 1, 0.02);  // the largest of thousands of weights dominate the sum
}

// P-8
TEST(LowPrecision, AnF32RunResumesInBf16AndBack) {
  TinyRun run;
  set(run, {"master_f32", 0, DType::f32});
  const Trained first = run.train(2);
  set(run, {"master_f32"});
  for (const auto& [name, a] : run.train(2).values)  // nothing to do
    EXPECT_EQ(a.to_doubles(), first.values.at(name).cast(DType::bf16).to_doubles()) << name;
  run.options.step.optim.learning_rate = 0;
  run.train(3);
  const HostArrays still = as_arrays(read_training_state(run.options.checkpoint_dir(), 3).state);
  for (const auto& [name, a] : first.values)  // a master weight starts as the f32 weight
    EXPECT_EQ(still.at("master/" + name).to_doubles(), a.to_doubles()) << name;
  set(run, {"master_f32"});
  run.train(4);
  const HostArrays state = as_arrays(read_training_state(run.options.checkpoint_dir(), 4).state);
  set(run, {"master_f32", 0, DType::f32});
  for (const auto& [name, a] : run.train(4).values)
    EXPECT_EQ(a.to_doubles(), state.at("master/" + name).to_doubles()) << name;
}

TEST(Resume, EqualsNoInterruptionWithBatchesOfSeveralSizes) {
  TinyRun whole, parts;
  for (TinyRun* run : {&whole, &parts}) {
    run->other_sizes = {dropping_task()};
    run->other_sizes[0].size = {32, 96};
  }
  start_tracing();
  const Trained expected = whole.train(9);
  const std::vector<TracedThread> threads = stop_tracing();
  EXPECT_EQ(std::ranges::count_if(threads,
                                  [](const TracedThread& t) {
                                    return std::ranges::any_of(
                                        t.spans, [](const TracedSpan& s) { return s.name == std::string("compile"); });
                                  }),
            2)
      << "the two programs are compiled side by side";
  parts.train(2);
  parts.train(5);
  expect_same_bits(expected.values, parts.train(9).values);
  expect_same_bits(as_arrays(read_training_state(whole.options.checkpoint_dir(), 9).state),
                   as_arrays(read_training_state(parts.options.checkpoint_dir(), 9).state));
  EXPECT_EQ(whole.metric("loss"), parts.metric("loss"));
  // 64 positions against 48: the FLOPs of a step depend on its batch size.
  const std::vector<double> flops = whole.metric("per_device_tflops");
  const std::set<double> sizes(flops.begin(), flops.end());
  EXPECT_EQ(flops, parts.metric("per_device_tflops"));
  EXPECT_EQ(sizes.size(), 2u);
  EXPECT_LT(*sizes.begin(), 0.85 * *sizes.rbegin());
}

TEST(Resume, TrainingBeyondTheLastStepDoesNothing) {
  TinyRun run;
  Trained t = run.train(2), again = run.train(2);
  expect_same_bits(t.values, again.values);
}

// S2-74, S4-69
TEST(Resume, CheckpointsOnTheWayDoNotChangeTheRun) {
  TinyRun plain, saving;
  saving.options.keys.checkpoint_every = 8;  // samples: two steps
  expect_same_bits(plain.train(6).values, saving.train(6).values);
  EXPECT_EQ(list_checkpoints(saving.options.checkpoint_dir()), (std::vector<int64_t>{2, 4, 6}));
}

TEST(Loop, TheLastCheckpointMayBeLeftOut) {
  TinyRun run;
  run.options.keys.save_final_checkpoint = false;
  run.train(2);
  EXPECT_TRUE(list_checkpoints(run.options.checkpoint_dir()).empty());
  // Checkpoints at their interval are still saved.
  run.options.keys.checkpoint_every = 8;  // samples: two steps
  run.train(4);
  EXPECT_EQ(list_checkpoints(run.options.checkpoint_dir()), (std::vector<int64_t>{2, 4}));
}

TEST(Loop, TheBatchThatIsReusedIsTheSameAfterResuming) {
  TinyRun whole, parts;
  for (TinyRun* run : {&whole, &parts}) run->options.keys.reuse_example_batch = true;
  const Trained expected = whole.train(4);
  parts.train(2);
  expect_same_bits(expected.values, parts.train(4).values);
}

TEST(Loop, LossThatIsNotFiniteStopsTheRunAndKeepsTheStateBeforeIt) {
  TinyRun good, bad;
  bad.poison = NAN;
  try {
    bad.train(12);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("finite"), std::string::npos) << e.what();
  }
  std::vector<int64_t> saved = list_checkpoints(bad.options.checkpoint_dir());
  ASSERT_EQ(saved.size(), 1u);
  ASSERT_GT(saved[0], 0);
  // The same steps without the bad image give the same state.
  good.train(saved[0]);
  CheckpointContent a = read_training_state(good.options.checkpoint_dir(), saved[0]),
                    b = read_training_state(bad.options.checkpoint_dir(), saved[0]);
  a.state.erase("healthy");
  b.state.erase("healthy");
  expect_same_bits(as_arrays(a.state), as_arrays(b.state));
  EXPECT_EQ(a.state_json, b.state_json);
}

/// The error message and log of train().
std::pair<std::string, std::string> error_and_log(TinyRun& run, int64_t steps) {
  testing::internal::CaptureStderr();
  std::string error;
  try {
    run.train(steps);
  } catch (const Error& e) {
    error = e.what();
  }
  return {error, testing::internal::GetCapturedStderr()};
}

/// Saves every step.
void save_often(TinyRun& run) {
  run.options.keys.checkpoint_every = 4;
  run.options.keys.checkpoints_to_keep = 0;
  run.options.step.ema_decay = 0;
}

TEST(Loop, AFolderThatIsDeletedOrMovedEndsTheRunAfterSavingItsState) {
  TinyRun whole;
  save_often(whole);
  whole.train(6);
  const HostArrays expected = as_arrays(read_training_state(whole.options.checkpoint_dir(), 6).state);
  for (const std::string variant : {"deleted", "moved", "replaced", "without checkpoints"}) {
    SCOPED_TRACE(variant);
    TinyRun run;
    save_often(run);
    const std::string folder = run.options.folder = run.folder / "run", dir = run.options.checkpoint_dir();
    {
      const RunLock lock(folder);
      run.options.check_folder = [&] { lock.check_folder(); };
      const auto act = [&](LoopView&) {
        while (list_checkpoints(dir) != std::vector<int64_t>{1, 2})  // written while steps run
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (variant == "moved") return std::filesystem::rename(folder, run.folder / "elsewhere");
        std::filesystem::remove_all(variant == "without checkpoints" ? dir : folder);
        if (variant == "replaced") make_folders(dir);
      };
      run.options.hooks = {{[](const Progress& p) { return p.done == 3; }, act}};
      const std::string error = error_and_log(run, 6).first;
      EXPECT_TRUE(error.starts_with("'" + (variant == "without checkpoints" ? dir : folder) +
                                    "' was deleted or moved while this run wrote to it"))
          << error;
      EXPECT_NE(error.find("the state after step 3 is saved in " + dir + "/3"), std::string::npos) << error;
    }
    EXPECT_EQ(checkpoint_folders(dir), std::vector<int64_t>{3});
    if (variant == "moved") {
      EXPECT_EQ(list_checkpoints(run.folder / "elsewhere/checkpoints"), (std::vector<int64_t>{1, 2}));
    }
    run.options.hooks.clear(), run.options.check_folder = {};
    run.train(6);
    expect_same_bits(expected, as_arrays(read_training_state(dir, 6).state));
  }
}

TEST(Resume, ACheckpointThatMayNotBeReadIsNotTakenForDamaged) {
  namespace fs = std::filesystem;
  TinyRun whole, run;
  for (TinyRun* r : {&whole, &run}) save_often(*r);
  whole.train(4);
  run.train(3);
  fs::permissions(run.folder.path(), fs::perms::all);
  const std::string dir = run.options.checkpoint_dir();
  const bool root = ::geteuid() == 0;  // root may read everything
  for (const std::string name : {"", "/training_state", "/training_state/state.json", "/training_state/checksums.json",
                                 "/unet", "/unet/diffusion_pytorch_model.safetensors"}) {
    SCOPED_TRACE(name);
    const std::string closed = dir + "/3" + name;
    const fs::perms before = fs::status(closed).permissions();
    fs::permissions(closed, fs::perms::none);
    ASSERT_TRUE(!root || ::seteuid(65534) == 0);
    const std::string error = error_and_log(run, 4).first;
    ASSERT_TRUE(!root || ::seteuid(0) == 0);
    fs::permissions(closed, before);
    EXPECT_TRUE(error.starts_with("open '" + closed + "': Permission denied")) << error;
    EXPECT_NE(error.find("no older one is used in its place"), std::string::npos) << error;
    EXPECT_EQ(checkpoint_folders(dir), (std::vector<int64_t>{1, 2, 3}));
    EXPECT_FALSE(exists(dir + "/3.damaged"));
  }
  run.train(4);
  expect_same_bits(as_arrays(read_training_state(whole.options.checkpoint_dir(), 4).state),
                   as_arrays(read_training_state(dir, 4).state));
}

TEST(Loop, AStateThatIsNotFiniteIsNeverSaved) {
  TinyRun run;
  save_often(run);
  run.train(3);
  // The loss of the last step precedes its update: only checking the state finds the NaN.
  run.options.step.optim.learning_rate = NAN;
  const auto [error, log] = error_and_log(run, 4);
  EXPECT_NE(error.find("the state after step 4 is not saved: '"), std::string::npos) << error;
  EXPECT_NE(error.find("' holds nan at element"), std::string::npos) << error;
  EXPECT_EQ(checkpoint_folders(run.options.checkpoint_dir()), (std::vector<int64_t>{1, 2, 3}));
  // Two steps: the second one's loss is not finite, and the state before it is bad too, so nothing is saved.
  run.options.keys.checkpoint_every = -1;
  const std::string later = error_and_log(run, 6).first;
  EXPECT_NE(later.find("is not finite at step 5"), std::string::npos) << later;
  EXPECT_NE(later.find("the state after step 4 is not saved"), std::string::npos) << later;
  EXPECT_EQ(checkpoint_folders(run.options.checkpoint_dir()), (std::vector<int64_t>{1, 2, 3}));
}

// The step whose loss is not finite began with weights that had diverged: they are not kept, and the checkpoint of
// these weights is set aside.
TEST(Loop, AStateThatHasDivergedIsNotKept) {
  TinyRun whole, run;
  for (TinyRun* r : {&whole, &run}) {
    save_often(*r);
    r->options.step.optim.lr_scheduler = "constant";
  }
  whole.train(6);
  run.train(3);
  run.options.step.optim.learning_rate = 1e30;
  const std::string dir = run.options.checkpoint_dir(), error = error_and_log(run, 9).first;
  EXPECT_NE(error.find("is not finite at step 5"), std::string::npos) << error;
  EXPECT_NE(error.find("the state after step 4 is not saved: the loss of the next batches is not finite either"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("its checkpoint is '" + dir + "/4.damaged' now"), std::string::npos) << error;
  EXPECT_NE(error.find("the newest checkpoint before it is " + dir + "/3"), std::string::npos) << error;
  EXPECT_EQ(checkpoint_folders(dir), (std::vector<int64_t>{1, 2, 3}));
  run.options.step.optim.learning_rate = whole.options.step.optim.learning_rate;
  run.train(6);
  expect_same_bits(as_arrays(read_training_state(dir, 6).state),
                   as_arrays(read_training_state(whole.options.checkpoint_dir(), 6).state));
}

/// Changes the JSON of a checkpoint's state.
void change_state(const TinyRun& run, int64_t step, const std::function<void(nlohmann::json&)>& change) {
  const std::string folder = checkpoint_folder(run.options.checkpoint_dir(), step) + "/training_state/";
  nlohmann::json j = parse_json(read_file(folder + "state.json"));
  change(j);
  write_file_atomic(folder + "state.json", j.is_null() ? "" : j.dump());
  std::filesystem::remove(folder + "checksums.json");  // as in an older version, or tampered with
}

TEST(Resume, DamagedStateIsNamedAndTheCheckpointBeforeItUsed) {
  TinyRun whole;
  save_often(whole);
  const Trained expected = whole.train(4);
  using nlohmann::json;
  const std::vector<std::pair<std::function<void(json&)>, std::string>> cases = {
      {[](json& j) { j = nullptr; }, "state.json': not JSON"},
      {[](json& j) { j = json::array(); }, "state.json': array; expected a JSON object"},
      {[](json& j) { j = json::object(); }, "state.json': it has no 'step'"},
      {[](json& j) { j["dataset"] = 3; }, "state.json': 'dataset' is 3; expected an object"},
      {[](json& j) { j["dataset"]["samples"] = -2; }, "'samples' is -2; expected a whole number of 0 or more"},
      {[](json& j) { j["dataset"]["names"] = 1; }, "'names' of 'dataset' is 1; expected a hash"},
      {[](json& j) { j["step"] = 2; }, "'step' is 2; expected 3, as its folder is named"},
      {[](json& j) { j["offset"] = -1; }, "'offset' is -1; expected a whole number of 0 or more"},
      {[](json& j) { j["epoch"] = "one"; }, "'epoch' is \"one\"; expected a whole number"},
      {[](json& j) { j["index"] = 1.5; }, "'index' is 1.5; expected a whole number"},
      {[](json& j) { j.erase("index"); }, "it has no 'index'"},
      {[](json& j) { j["seed"] = json::object(); }, "'seed' is {}; expected a whole number"},
      {[](json& j) { j["taken"] = 18446744073709551615u; }, "'taken' is 18446744073709551615; expected"}};
  TinyRun run;
  save_often(run);
  run.train(3);
  const std::string dir = run.options.checkpoint_dir();
  const std::string backup = run.folder / "kept";
  std::filesystem::copy(dir, backup, std::filesystem::copy_options::recursive);
  for (const auto& [change, message] : cases) {
    SCOPED_TRACE(message);
    std::filesystem::remove_all(dir);
    std::filesystem::copy(backup, dir, std::filesystem::copy_options::recursive);
    change_state(run, 3, change);
    const auto [error, log] = error_and_log(run, message == cases.back().second ? 4 : 2);
    EXPECT_EQ(error, "");
    EXPECT_NE(log.find(message), std::string::npos) << log;
    EXPECT_NE(log.find("it is '" + dir + "/3.damaged' now"), std::string::npos) << log;
    EXPECT_NE(log.find("training resumes from the checkpoint before: " + dir + "/2"), std::string::npos) << log;
  }
  expect_same_bits(as_arrays(read_training_state(whole.options.checkpoint_dir(), 4).state),
                   as_arrays(read_training_state(dir, 4).state));
  EXPECT_EQ(run.metric("loss").size(), 4u);
}

TEST(Resume, MomentsThatAreNotFiniteAndFlippedBytesAreNamed) {
  TinyRun run;
  save_often(run);
  run.train(2);
  const std::string dir = run.options.checkpoint_dir(), state = dir + "/2/training_state/";
  HostArrays arrays = as_arrays(read_training_state(dir, 2).state);
  auto moment = std::ranges::find_if(arrays, [](const auto& a) { return a.first.starts_with("adam_v/"); });
  HostArray poisoned = moment->second.cast(DType::f32).reshaped(moment->second.dims());
  poisoned = rows(poisoned, 0, poisoned.dims()[0]);  // a copy
  poisoned.mutable_view<float>()[1] = NAN;
  arrays[moment->first] = poisoned;
  write_safetensors(state + "arrays.safetensors", arrays);
  std::filesystem::remove(state + "checksums.json");
  auto [error, log] = error_and_log(run, 1);
  EXPECT_EQ(error, "");
  EXPECT_NE(log.find("'" + moment->first + "' holds nan at element 1"), std::string::npos) << log;
  EXPECT_NE(log.find("resumes from the checkpoint before: " + dir + "/1"), std::string::npos) << log;

  const std::string weights = dir + "/1/unet/diffusion_pytorch_model.safetensors";
  std::string bytes = read_file(weights);
  bytes[bytes.size() - 3] ^= 4;
  write_file_atomic(weights, bytes);
  std::tie(error, log) = error_and_log(run, 1);
  EXPECT_NE(error.find(weights + "': its bytes differ from those written"), std::string::npos) << error;
  EXPECT_NE(error.find("no checkpoint in '" + dir + "' can be resumed"), std::string::npos) << error;
  EXPECT_TRUE(exists(dir + "/1"));           // the only checkpoint is not renamed
  EXPECT_EQ(run.metric("loss").size(), 1u);  // no new run overwrote it
}

}  // namespace
}  // namespace md
