// Interrupted equals uninterrupted, bit for bit: 2N steps against N, a new process's worth of objects, and N more.
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/batches/aspect_bucket_batches.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/tasks/denoise.h"
#include "maxdiffusion/train/loop.h"
#include "tests/tiny_folder.h"

namespace md {
namespace {

DenoiseTask tiny_task() {
  DenoiseTask t;
  t.family = tiny_family();
  t.process =
      make_process({{"beta_schedule", "scaled_linear"}, {"beta_start", 0.00085}, {"beta_end", 0.012}}, ProcessKeys{});
  t.batch_size = 4;
  t.size = {64, 64};
  t.caption_dropout = 0.2;
  return t;
}

HostArray noise(Shape shape, const char* purpose) {
  HostArray a(shape);
  HostRng(7, purpose).fill(HostRng::Distribution::normal, 1, 0, a.mutable_view<float>());
  for (float& v : a.mutable_view<float>()) v = std::fabs(v);
  return a;
}

struct TinyRun {
  TemporaryFolder folder;
  Devices devices = Devices::open();
  DenoiseTask task = tiny_task();
  LoopOptions options;
  float poison = 0;                          // added to the latents of sample 9
  std::vector<DenoiseTask> other_sizes;  // given: every batch is of one of the sizes

  TinyRun() {
    options.title = "test";
    options.folder = folder.path();
    options.step.optim.learning_rate = 1e-3;
    options.step.optim.learning_rate_schedule_steps = 100;
    options.step.ema_decay = 0.9;
    static TemporaryFolder cache;  // the programs of one process's tests, compiled once
    options.compile.jax_cache_dir = cache.path();
  }

  Trained train(int64_t steps) {
    options.step.optim.max_train_steps = steps;
    options.initial = [](const ParamTable& params) {
      return [&params] {
        HostArrays v;
        for (const Param& p : params.params()) v[p.input] = initial_value(p, 3);
        return v;
      };
    };
    options.constants = {{"empty_prompt_embeds", noise({DType::f32, {5, 12}}, "empty")},
                           {"empty_text_embeds", noise({DType::f32, {10}}, "empty pooled")}};
    auto samples = [](const DenoiseTask& t, int64_t n) {
      return Batch{{"moments", noise({DType::f32, {n, t.size.height / 8, t.size.width / 8, 8}}, "moments")},
                   {"prompt_embeds", noise({DType::f32, {n, 5, 12}}, "prompts")},
                   {"text_embeds", noise({DType::f32, {n, 10}}, "pooled")}};
    };
    std::vector<Batch> groups = {samples(task, 11)};
    groups[0].at("moments").mutable_view<float>()[9 * 8 * 8 * 8] += poison;
    if (other_sizes.empty())
      return train_loop(devices, {&task}, in_memory(groups[0], task.batch_size, 5), options);
    std::vector<const Task*> tasks = {&task};
    for (const DenoiseTask& t : other_sizes) {
      tasks.push_back(&t);
      groups.push_back(samples(t, 6));
    }
    return train_loop(devices, tasks, in_aspect_buckets(groups, task.batch_size, {.seed = 5}), options);
  }

  /// Of every step.
  std::vector<double> metric(const char* name) const {
    std::vector<double> out;
    std::istringstream lines(read_file(folder / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) out.push_back(nlohmann::json::parse(line).at(name));
    return out;
  }
};

void expect_same_bits(const HostArrays& a, const HostArrays& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, x] : a) {
    const HostArray& y = b.at(name);
    ASSERT_EQ(x.bytes(), y.bytes()) << name;
    EXPECT_EQ(0, std::memcmp(x.data(), y.data(), x.bytes())) << name;
  }
}

TEST(Resume, EqualsNoInterruptionBitForBit) {
  for (double ema : {0.0, 0.9}) {
    TinyRun whole, parts;
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
    EXPECT_EQ(nlohmann::json::parse(a.state_json).at("maxdiffusion_version"), version());
  }
}

std::set<std::string> kinds_of(const HostArrays& state) {
  std::set<std::string> kinds;
  for (const auto& [name, a] : state) kinds.insert(name.substr(0, name.find('/')));
  return kinds;
}

TEST(LowPrecision, ResumedEqualsUninterruptedBitForBit) {
  for (const char* update : {"master", "stochastic", "plain"})
    for (double ema : {0.0, 0.9}) {
      SCOPED_TRACE(std::string(update) + " " + std::to_string(ema));
      TinyRun whole, parts;
      for (TinyRun* run : {&whole, &parts}) {
        run->options.step.scope.weights = DType::bf16;
        run->options.step.optim.low_precision_update = update;
        run->options.step.ema_decay = ema;
      }
      const Trained expected = whole.train(6);
      parts.train(3);
      expect_same_bits(expected.values, parts.train(6).values);
      const HostArrays state = as_arrays(read_training_state(whole.options.checkpoint_dir(), 6).state);
      expect_same_bits(state, as_arrays(read_training_state(parts.options.checkpoint_dir(), 6).state));

      // What the model's file holds is not repeated; everything else is f32, except weights without a master.
      std::set<std::string> kinds = {"step", "healthy", "adam_m", "adam_v"};
      const bool master = std::string(update) == "master";
      if (master) kinds.insert("master");
      if (ema > 0) kinds.insert("ema");
      if (ema > 0 && !master) kinds.insert("unet");
      EXPECT_EQ(kinds_of(state), kinds);
      for (const auto& [name, a] : state)
        if (name.find('/') != std::string::npos) {
          EXPECT_EQ(a.dtype(), name.starts_with("unet/") ? DType::bf16 : DType::f32) << name;
        }
      for (const auto& [name, a] : expected.values) {
        EXPECT_EQ(a.dtype(), DType::bf16) << name;
        const auto exact = state.find((ema > 0 ? "ema/" : "master/") + name);
        if (exact != state.end()) {
          EXPECT_EQ(a.to_doubles(), exact->second.cast(DType::bf16).to_doubles()) << name;
        }
      }
    }
}

/// ‖a − b‖ / ‖a − start‖ over all values.
double distance(const HostArrays& a, const HostArrays& b, const HostArrays& start) {
  double difference = 0, way = 0;
  for (const auto& [name, array] : a) {
    const std::vector<double> x = array.to_doubles(), y = b.at(name).to_doubles(), z = start.at(name).to_doubles();
    for (size_t i = 0; i < x.size(); ++i) {
      difference += (x[i] - y[i]) * (x[i] - y[i]);
      way += (x[i] - z[i]) * (x[i] - z[i]);
    }
  }
  return std::sqrt(difference / way);
}

TEST(LowPrecision, SmallUpdatesAddUpUnlessRoundedToNearest) {
  auto train = [](const char* update, DType weights, int64_t steps) {
    TinyRun run;
    run.options.step.optim.learning_rate = 2e-5;  // a tenth of the distance to the next bf16 number near 0.1
    run.options.step.optim.lr_scheduler = "constant";
    run.options.step.ema_decay = 0;
    run.options.step.scope.weights = weights;
    run.options.step.optim.low_precision_update = update;
    run.options.keys.save_final_checkpoint = false;
    return run.train(steps).values;
  };
  const HostArrays exact = train("master", DType::f32, 40), start = train("master", DType::f32, 0);
  const double master = distance(exact, train("master", DType::bf16, 40), start);
  const double stochastic = distance(exact, train("stochastic", DType::bf16, 40), start);
  const double plain = distance(exact, train("plain", DType::bf16, 40), start);
  EXPECT_LT(master, 0.5);
  EXPECT_LT(stochastic, 1);
  EXPECT_GT(plain, 0.9);
}

TEST(LowPrecision, AnF32RunGoesOnInBf16AndBack) {
  TinyRun run;
  run.options.step.ema_decay = 0;
  const Trained f32 = run.train(2);
  run.options.step.scope.weights = DType::bf16;
  run.train(2);  // nothing to do
  const Trained bf16 = run.train(4);
  const HostArrays state = as_arrays(read_training_state(run.options.checkpoint_dir(), 4).state);
  for (const auto& [name, a] : bf16.values) EXPECT_EQ(a.dtype(), DType::bf16);
  run.options.step.scope.weights = DType::f32;
  run.options.step.optim.learning_rate = 0;
  const Trained again = run.train(5);
  for (const auto& [name, a] : again.values) EXPECT_EQ(a.to_doubles(), state.at("master/" + name).to_doubles()) << name;
}

TEST(Resume, EqualsNoInterruptionWithBatchesOfSeveralSizes) {
  TinyRun whole, parts;
  for (TinyRun* run : {&whole, &parts}) {
    run->other_sizes = {tiny_task()};
    run->other_sizes[0].size = {32, 96};
  }
  const Trained expected = whole.train(9);
  parts.train(2);
  parts.train(5);
  expect_same_bits(expected.values, parts.train(9).values);
  expect_same_bits(as_arrays(read_training_state(whole.options.checkpoint_dir(), 9).state),
                   as_arrays(read_training_state(parts.options.checkpoint_dir(), 9).state));
  EXPECT_EQ(whole.metric("loss"), parts.metric("loss"));
  // 64 positions against 48: the work of a step follows its batch.
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
  // The same steps without the bad picture give the same state.
  good.train(saved[0]);
  CheckpointContent a = read_training_state(good.options.checkpoint_dir(), saved[0]),
                    b = read_training_state(bad.options.checkpoint_dir(), saved[0]);
  a.state.erase("healthy");
  b.state.erase("healthy");
  expect_same_bits(as_arrays(a.state), as_arrays(b.state));
  EXPECT_EQ(a.state_json, b.state_json);
}

}  // namespace
}  // namespace md
