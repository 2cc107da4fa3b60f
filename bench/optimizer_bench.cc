// The time of one update by each optimizer: optimizer_bench [million weights (32)] [optimizer …]
// Updates 1024 × 1024 matrices, each with a vector, on the devices of this machine, in place. Prints one JSON line per
// optimizer: seconds and processor seconds of all threads (medians of 7 updates), the ratio of the latter to AdamW's,
// which runs before each, seconds of compilation, bytes of state per weight.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/train/update.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;
double seconds(Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); }

nlohmann::json bench(const Devices& devices, const std::string& optimizer, int64_t matrices) {
  OptimConfig config;
  config.optimizer = optimizer;
  config.lr_scheduler = "constant";
  const auto rule = make_optimizer(config);
  const std::vector<StateSlot> slots = rule->slots();
  Graph g(devices.graph_options());
  ArrayMap state, read_only;
  int64_t bytes = 0, weights = 0;
  auto input = [&](const std::string& name, const Shape& shape, bool is_state) {
    HostArray start(shape);
    std::fill_n(start.mutable_data(), start.bytes(), std::byte{0});
    if (shape.dtype == DType::f32 && shape.elements() > 1 && (name.starts_with("p") || name.starts_with("g")))
      HostRng(1, name).fill(HostRng::Distribution::normal, 0.02, 0, start.mutable_view<float>());
    (is_state ? state : read_only)[name] = devices.put(start);
    return g.input(name, shape);
  };
  auto output = [&](const std::string& name, Tensor after) {
    g.output(name, after, name);
    g.alias(name, name);
  };
  UpdateGroup group;
  group.slots.resize(slots.size());
  ClippedGradients grads;
  for (int64_t i = 0; i < 2 * matrices; ++i) {
    const Dims dims = i % 2 == 0 ? Dims{1024, 1024} : Dims{1024};
    const std::string name = std::to_string(i);
    grads.unclipped.push_back(input("g" + name, {DType::f32, dims}, false));
    group.params.push_back(input("p" + name, {DType::f32, dims}, true));
    group.axes.emplace_back(dims.size());
    weights += Shape{DType::f32, dims}.elements();
    for (size_t k = 0; k < slots.size(); ++k) {
      const auto array = slots[k].array({dims, {}});
      if (array) bytes += array->shape.bytes();
      group.slots[k].push_back(array ? input(slots[k].prefix + name, array->shape, true) : Tensor());
    }
  }
  for (const StateScalar& s : rule->scalars()) group.scalars.push_back(input(s.prefix, {DType::f32, {}}, true));
  const Tensor step = input("step", {DType::s32, {}}, false);
  group = apply_update(*rule, {learning_rate(config, step), cast(step, DType::f32), is_finite(constant(g, 1.0)), {}},
                       grads, group);
  for (size_t i = 0; i < group.params.size(); ++i) {
    output("p" + std::to_string(i), group.params[i]);
    for (size_t k = 0; k < slots.size(); ++k)
      if (group.slots[k][i]) output(slots[k].prefix + std::to_string(i), group.slots[k][i]);
  }
  for (size_t k = 0; k < group.scalars.size(); ++k) output(rule->scalars()[k].prefix, group.scalars[k]);
  const auto compiling = Clock::now();
  const Program program = compile(devices, g, {.jax_cache_dir = "off"}, optimizer);
  const double compiled = seconds(compiling);
  std::vector<double> times, cpu_times;
  const auto median = [](std::vector<double> of) {
    std::ranges::sort(of);
    return of[of.size() / 2];
  };
  for (int i = 0; i < 9; ++i) {
    const auto begun = Clock::now();
    const std::clock_t cpu = std::clock();
    state = program.run(state, read_only);
    for (auto& [name, a] : state) a.shards()[0].wait();
    if (i < 2) continue;
    times.push_back(seconds(begun));
    cpu_times.push_back(static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
  }
  return {{"optimizer", optimizer},
          {"seconds", median(times)},
          {"cpu_seconds", median(cpu_times)},
          {"compile_seconds", compiled},
          {"state_bytes_per_weight", static_cast<double>(bytes) / static_cast<double>(weights)}};
}

}  // namespace
}  // namespace md

int main(int argc, char** argv) {
  using namespace md;
  try {
    const int64_t matrices = argc > 1 ? std::stoll(argv[1]) : 32;
    std::vector<std::string> names(argv + std::min(argc, 2), argv + argc);
    if (names.empty()) names = optimizer_names();
    const Devices devices = Devices::open();
    for (const std::string& name : names) {
      const double adamw = bench(devices, "adamw", matrices).at("cpu_seconds");
      nlohmann::json row = bench(devices, name, matrices);
      row["times_adamw"] = row.at("cpu_seconds").get<double>() / adamw;
      std::printf("%s\n", row.dump().c_str());
      std::fflush(stdout);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
  return 0;
}
