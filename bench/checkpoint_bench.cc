// How much saving a checkpoint slows a training loop: checkpoint_bench FOLDER [megabytes of state (1000)]
// Each step multiplies a float32 state in place; one checkpoint is saved while the loop runs, as in training. Prints
// one JSON line. bench/checkpoint.py runs it next to the same loop with Orbax and makes the table.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/finite.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;
double seconds(Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); }

/// Resident anonymous memory (RssAnon) of the process in bytes.
int64_t anonymous() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) * 1024;
  return 0;
}

double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v[v.size() / 2];
}

void bench(const std::string& folder, int64_t megabytes) {
  constexpr int64_t kArrays = 50;
  const Shape shape{DType::f32, {megabytes * 1'000'000 / kArrays / 4}};
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  ArrayMap state;
  for (int64_t i = 0; i < kArrays; ++i) {
    const std::string name = fmt::format("adam_m/unet/{:02}", i);
    HostArray start(shape);  // random, so it does not compress
    HostRng(1, name).fill(HostRng::Distribution::normal, 1, 0, start.mutable_view<float>());
    g.output(name, g.input(name, shape) * 1.0001, name);
    g.alias(name, name);
    state[name] = devices.put(start);
  }
  const Program program = compile(devices, g, {.jax_cache_dir = "off"}, "step");
  const auto step = [&] {
    const auto begun = Clock::now();
    state = program.run(state);
    for (auto& [name, a] : state) a.shards()[0].wait();
    return seconds(begun);
  };
  for (int i = 0; i < 3; ++i) step();
  std::vector<double> before;
  for (int i = 0; i < 9; ++i) before.push_back(step());
  const double usual = median(before);

  CheckpointWriter writer(folder, 1);
  const int64_t memory = anonymous();
  std::atomic<int64_t> most = memory;
  std::atomic<bool> done = false;
  std::jthread sampler([&] {
    for (; !done; std::this_thread::sleep_for(std::chrono::milliseconds(2))) most = std::max(most.load(), anonymous());
  });
  const auto begun = Clock::now();
  std::map<std::string, PendingShards> pending;
  for (const auto& [name, a] : state) pending[name] = fetch_shards(devices, a);
  writer.save(1, [pending = std::move(pending)] {
    CheckpointContent c;
    for (const auto& [name, p] : pending) c.state[name] = p.wait();
    for (const auto& [name, a] : c.state)
      check(!first_not_finite(a.shards.at(0).values), Code::device, "'{}' is not finite", name);
    c.state_json = "{}";
    return c;
  });
  const double call = seconds(begun);
  std::atomic<double> written = 0;
  std::jthread waiter([&] {
    writer.finish();
    written = seconds(begun);
    done = true;
  });
  double first = 0, second = 0;
  for (int64_t i = 0; !done; ++i) {
    const double extra = step() - usual;
    second += extra;
    if (i == 0) first = extra;
  }
  const double gigabytes = static_cast<double>(megabytes) / 1000;
  std::printf("%s\n", nlohmann::json{{"program", "maxdiffusion.cpp"},
                                     {"step_ms", usual * 1e3},
                                     {"call_ms_per_gb", call * 1e3 / gigabytes},
                                     {"first_step_ms_per_gb", first * 1e3 / gigabytes},
                                     {"steps_ms_per_gb", second * 1e3 / gigabytes},
                                     {"written_s_per_gb", written / gigabytes},
                                     {"memory_part", static_cast<double>(most - memory) / 1e9 / gigabytes}}
                          .dump()
                          .c_str());
}

}  // namespace
}  // namespace md

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  try {
    md::bench(argv[1], argc > 2 ? std::atoll(argv[2]) : 1000);
  } catch (const md::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
