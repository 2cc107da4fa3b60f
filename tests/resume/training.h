// A minimal training run in this process.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/batches/aspect_bucket_batches.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/tasks/denoise.h"
#include "maxdiffusion/train/loop.h"
#include "tests/tiny_folder.h"

namespace md {

inline DenoiseTask dropping_task() {
  DenoiseTask t = tiny_task();
  t.caption_dropout = 0.2;
  return t;
}

inline HostArray noise(const Shape& shape, const char* purpose) {
  HostArray a(shape);
  HostRng(7, purpose).fill(HostRng::Distribution::normal, 1, 0, a.mutable_view<float>());
  for (float& v : a.mutable_view<float>()) v = std::fabs(v);
  return a;
}

/// LoopOptions::initial: each parameter's initial_value.
inline std::function<NamedShards()> initial_values(const ParamTable& params) {
  return [&params] {
    NamedShards v;
    for (const Param& p : params.params()) v[p.input] = initial_value(p, 3);
    return v;
  };
}

struct TinyRun {
  TemporaryFolder folder;
  Devices devices = Devices::open();
  DenoiseTask task = dropping_task();
  LoopOptions options;
  float poison = 0;                      // added to the latents of sample 9
  std::vector<DenoiseTask> other_sizes;  // if set, each batch has one of these sizes

  TinyRun() {
    options.title = "test";
    options.folder = folder.path();
    options.step.optim.learning_rate = 1e-3;
    options.step.optim.learning_rate_schedule_steps = 100;
    options.step.ema_decay = 0.9;
    options.compile.xla_flags = "--xla_backend_optimization_level=0";  // halves the time; tests compare runs
  }

  Trained train(int64_t steps) {
    options.step.optim.max_train_steps = steps;
    options.initial = initial_values;
    options.constants = {{"empty_prompt_embeds", noise({DType::f32, {5, 12}}, "empty")},
                         {"empty_text_embeds", noise({DType::f32, {10}}, "empty pooled")}};
    auto samples = [](const DenoiseTask& t, int64_t n) {
      return Batch{{"moments", noise({DType::f32, {n, t.size.height / 8, t.size.width / 8, 8}}, "moments")},
                   {"prompt_embeds", noise({DType::f32, {n, 5, 12}}, "prompts")},
                   {"text_embeds", noise({DType::f32, {n, 10}}, "pooled")}};
    };
    std::vector<Batch> groups = {samples(task, 11)};
    groups[0].at("moments").mutable_view<float>()[size_t{9} * 8 * 8 * 8] += poison;
    if (other_sizes.empty()) return train_loop(devices, {&task}, in_memory(groups[0], task.batch_size, 5), options);
    std::vector<const Task*> tasks = {&task};
    for (const DenoiseTask& t : other_sizes) {
      tasks.push_back(&t);
      groups.push_back(samples(t, 6));
    }
    return train_loop(devices, tasks, in_aspect_buckets(groups, task.batch_size, {.seed = 5}), options);
  }

  /// The metric of every step.
  std::vector<double> metric(const char* name) const {
    std::vector<double> out;
    std::istringstream lines(read_file(folder / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) out.push_back(parse_json(line).at(name));
    return out;
  }
};

inline void expect_same_bits(const HostArrays& a, const HostArrays& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, x] : a) {
    const HostArray& y = b.at(name);
    ASSERT_EQ(x.bytes(), y.bytes()) << name;
    EXPECT_EQ(0, std::memcmp(x.data(), y.data(), x.bytes())) << name;
  }
}

}  // namespace md
