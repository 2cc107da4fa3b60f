// One training step of a model, timed from the start of the process: model_bench unet|vae|wan|z_image|qwen_image
// f32|bf16 [options]
//   --work NAME    train, or predict: one call of the denoiser, as in a step of sampling; also of qwen3, a text encoder
//   of
//                  512 tokens. Weights then have the type of activations
//   --steps N      timed steps after the first (10)
//   --cache DIR    executable cache; "off" (the default) compiles
//   --name TEXT    first column of the row
//   --mesh SIZES   data, fsdp, context, tensor: 2,4,1,1 is eight virtual devices (one device)
//   --batch N      samples of a step (2; transformers: 1)
//   --pixels N     height and width of the UNet's latents (64)
//   --config FILE  config.json of another UNet or transformer
//   --emit FILE    only traces the step, writes its program to FILE, and prints how long that takes
//   --spans N      runs N more steps after the timed ones and adds to the row the wall time in seconds of each kind of
//                  kernel; kernels may run in parallel (0)
// Prints one JSON line; its floor_s is a lower bound for the step's time on this machine: its products at the rate of
// one large product, plus the memory that it must read and write. model_bench rates f32|bf16 prints only both rates.
// bench/compare.py runs it next to the same step in other programs and makes the table.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "bench/models.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/vector_math.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/train/step.h"

namespace md {
namespace {

/// Seconds since the process started, by the kernel's clock (resolution 10 ms), so that loading the program counts.
double seconds_since_start() {
  std::ifstream stat("/proc/self/stat");
  std::string line((std::istreambuf_iterator<char>(stat)), {});
  std::istringstream fields(line.substr(line.rfind(')') + 2));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  const double started = std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 - started;
}

/// Peak resident memory of the process, bytes.
int64_t peak_resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  return 0;
}

/// Opens the devices with these sizes of the mesh axes, written as on the command line.
Devices open_mesh(const std::string& sizes) {
  if (sizes.empty()) return Devices::open();
  MeshConfig c;
  char comma = 0;
  std::istringstream words(sizes);
  words >> c.ici_data_parallelism >> comma >> c.ici_fsdp_parallelism >> comma >> c.ici_context_parallelism >> comma >>
      c.ici_tensor_parallelism;
  check(static_cast<bool>(words), Code::invalid_config, "model_bench: --mesh {} is not four numbers", sizes);
  return Devices::open(
      "cpu", c.ici_data_parallelism * c.ici_fsdp_parallelism * c.ici_context_parallelism * c.ici_tensor_parallelism, c);
}

/// CPU time of this process over all cores, user and system, in seconds.
double processor_seconds() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

HostArray zeros(const Shape& shape) {
  HostArray a(shape);
  std::fill_n(a.mutable_data(), a.bytes(), std::byte{0});
  return a;
}

/// Initial value of an input: parameters by their initializers, the batch normal random numbers, anything else zeros.
HostArray starting(const ParamTable& params, const std::string& name, const Shape& shape) {
  if (const Param* p = params.find(name)) return initial_value(*p, 0);
  HostArray a = zeros(shape);
  if (name == "healthy") a.mutable_view<uint8_t>()[0] = 1;
  if (name == "prompt_lengths") std::ranges::fill(a.mutable_view<int32_t>(), 512);  // text without padding
  if (name.find('/') != name.npos || shape.rank() < 2) return a;
  const HostRng rng(0, name);
  if (shape.dtype == DType::f32) {
    rng.fill(HostRng::Distribution::normal, 1, 0, a.mutable_view<float>());
  } else if (shape.dtype == DType::u8) {
    auto v = a.mutable_view<uint8_t>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(rng.below(i, 256));
  }
  return a;
}

/// The shortest time of several calls of f in seconds.
double shortest(const std::function<void()>& f) {
  double best = INFINITY;
  for (int i = 0; i < 6; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

/// Operations per second of one large product of this type.
double product_rate(const Devices& devices, DType type) {
  constexpr int64_t kSize = 4096, kColumns = 1024;
  Graph g(devices.graph_options());
  Tensor a = g.input("a", {type, {kSize, kSize}}), b = g.input("b", {type, {kSize, kColumns}});
  g.output("y", sum(matmul(a, b), {0}));  // small, so fetching it takes no time
  const Program program = compile(devices, g, {.jax_cache_dir = "off", .xla_flags = ""}, "floor");
  ArrayMap arrays;
  for (const GraphInput& in : g.inputs()) {
    HostArray x({DType::f32, in.value.dims()});
    HostRng(0, in.name).fill(HostRng::Distribution::normal, 1, 0, x.mutable_view<float>());
    arrays[in.name] = devices.put(x.cast(type), {}, in.name);
  }
  ArrayMap none;
  return 2.0 * kSize * kSize * kColumns / shortest([&] { devices.get(program.run(none, arrays).at("y")); });
}

/// Adds 1 to 4·n values, as four streams at once: processors prefetch several streams faster than one.
MD_VECTORIZED void add_one(uint64_t* values, size_t n) {
  for (size_t i = 0; i < n; ++i) ++values[i], ++values[i + n], ++values[i + 2 * n], ++values[i + 3 * n];
}

/// Bytes per second that all cores together read and write when they update a large array in place.
double memory_rate() {
  std::vector<uint64_t> array(size_t{1} << 25);
  const size_t threads = std::max(1u, std::thread::hardware_concurrency()), part = array.size() / threads / 4 * 4;
  const double seconds = shortest([&] {
    std::vector<std::jthread> all;
    for (size_t i = 0; i < threads; ++i) all.emplace_back([&, i] { add_one(&array[part * i], part / 4); });
  });
  return 2.0 * static_cast<double>(part * threads * sizeof(uint64_t)) / seconds;
}

/// Upper bounds of this machine: operations per second of products, bytes per second of memory.
struct Rates {
  double flops, bytes;
};
Rates measured_rates(const Devices& devices, DType type) { return {product_rate(devices, type), memory_rate()}; }

constexpr int64_t kTextTokens = 512;

/// Adds the denoiser's prediction for one sample, or the text encoder's last state, as output "y".
void trace_prediction(Graph& g, ParamTable& params, const std::string& model, const std::string& config,
                      const ScopeOptions& options) {
  const Models models = [&](const std::string& component) { return Scope(g, params, component, options); };
  if (model == "qwen3") {
    const std::string file = config.empty() ? MD_SOURCE_DIR "/bench/models/qwen3.json" : config;
    const Qwen3Config c = Qwen3Config::from_json(parse_json(read_file(file)));
    const Tensor ids = g.input("ids", {DType::s32, {1, kTextTokens}});
    g.output("y", cast(decoder_hidden_states(models(model), c, ids, {c.num_hidden_layers}).front(), DType::f32));
    return;
  }
  const auto transformer = bench_transformer(model);
  check(transformer.has_value(), Code::invalid_config,
        "model_bench: --work predict is of wan, z_image, qwen_image and qwen3, not of {}", model);
  const auto family = make_transformer_family(*transformer, config);
  Conditioning conditioning;
  for (const Field& f : family->spec().conditioning) conditioning[f.name] = g.input(f.name, batched(1, f.shape));
  const Tensor x = g.input("x", batched(1, {DType::f32, transformer->latents})), t = g.input("t", {DType::f32, {1}});
  g.output("y", family->predict(models, x, t, conditioning, {}));
}

int predict(const std::vector<std::string>& args, const std::string& name, const std::string& config, int steps,
            const CompileConfig& compile_config) {
  using Clock = std::chrono::steady_clock;
  const Devices devices = Devices::open();
  const AxisRules rules = AxisRules::defaults();
  ScopeOptions scope;
  scope.weights = scope.activations = parse_dtype(args[1]);
  Graph g(devices.graph_options(&rules));
  ParamTable params;
  trace_prediction(g, params, args[0], config, scope);
  const Program program = compile(devices, g, compile_config, "bench_predict");
  HostArrays values;
  for (const GraphInput& in : g.inputs()) values[in.name] = starting(params, in.name, in.value.shape());
  ArrayMap arrays, none;
  place(devices, program, std::move(values), arrays);
  double sum = 0;
  const auto one = [&] {
    const auto from = Clock::now();
    const HostArray y = devices.get(program.run(none, arrays).at("y"));
    sum = y.view<float>().front();
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  const double first = one(), to_first = seconds_since_start();
  std::vector<double> times, processor;
  for (int i = 0; i < steps; ++i) {
    const double from = processor_seconds();
    times.push_back(one());
    processor.push_back(processor_seconds() - from);
  }
  std::ranges::sort(times), std::ranges::sort(processor);
  const CompileReport& report = program.report();
  nlohmann::json row = {{"program", name},
                        {"model", args[0]},
                        {"dtype", args[1]},
                        {"parameters", params.count()},
                        {"compile_s", report.from_cache ? 0 : report.compile_seconds},
                        {"load_s", report.load_seconds},
                        {"first_step_s", first},
                        {"to_first_loss_s", to_first},
                        {"step_s", times.empty() ? 0.0 : times[times.size() / 2]},
                        {"fastest_s", times.empty() ? 0.0 : times.front()},
                        {"processor_s", processor.empty() ? 0.0 : processor[processor.size() / 2]},
                        {"peak_resident_mb", static_cast<double>(peak_resident()) / 1e6},
                        {"first_value", sum}};
  std::cout << row.dump() << std::endl;
  return 0;
}

int run(const std::vector<std::string>& args) {
  check(args.size() >= 2, Code::invalid_config,
        "usage: model_bench unet|vae|wan|z_image|qwen_image|qwen3 f32|bf16 [--work train|predict] [--steps N] [--cache "
        "DIR] [--name TEXT] [--flags TEXT] "
        "[--mesh D,F,C,T] [--batch N] [--pixels N] [--config FILE] [--emit FILE] [--spans N]");
  if (args[0] == "rates") {
    const Rates rates = measured_rates(Devices::open(), parse_dtype(args[1]));
    std::cout << nlohmann::json{{"gflop_per_s", rates.flops / 1e9}, {"gb_per_s", rates.bytes / 1e9}} << std::endl;
    return 0;
  }
  int steps = 10, traced = 0;
  int64_t batch = 0, pixels = 64;
  std::string name = "maxdiffusion.cpp", mesh, config, emit, work = "train";
  CompileConfig compile_config{.jax_cache_dir = "off", .xla_flags = ""};
  for (size_t i = 2; i + 1 < args.size(); i += 2) {
    if (args[i] == "--steps")
      steps = std::stoi(args[i + 1]);
    else if (args[i] == "--spans")
      traced = std::stoi(args[i + 1]);
    else if (args[i] == "--cache")
      compile_config.jax_cache_dir = args[i + 1];
    else if (args[i] == "--mesh")
      mesh = args[i + 1];
    else if (args[i] == "--batch")
      batch = std::stoll(args[i + 1]);
    else if (args[i] == "--pixels")
      pixels = std::stoll(args[i + 1]);
    else if (args[i] == "--config")
      config = args[i + 1];
    else if (args[i] == "--work")
      work = args[i + 1];
    else if (args[i] == "--emit")
      emit = args[i + 1];
    else if (args[i] == "--flags")
      compile_config.xla_flags = args[i + 1];
    else if (args[i] == "--name")
      name = args[i + 1];
    else
      fail(Code::invalid_config, "model_bench: unknown option {}", args[i]);
  }
  if (work == "predict") return predict(args, name, config, steps, compile_config);
  check(work == "train", Code::invalid_config, "model_bench: --work is {}; expected train or predict", work);
  using Clock = std::chrono::steady_clock;
  auto since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };

  const auto task = make_bench_task(args[0], batch, pixels, config);
  const Devices devices = open_mesh(mesh);
  const AxisRules rules = AxisRules::defaults();
  ScopeOptions scope;
  scope.activations = parse_dtype(args[1]);
  OptimConfig optim;
  optim.lr_scheduler = "constant";
  optim.learning_rate = 1e-4;
  auto start = Clock::now();
  const StepGraph step =
      trace_step(*task, devices.graph_options(&rules), {.scope = scope, .optim = optim.with_switches(true)});
  const double trace = since(start);
  if (!emit.empty()) {
    start = Clock::now();
    const std::string text = to_stablehlo(*step.graph);
    const double seconds = since(start);
    write_file_atomic(emit, text);
    std::cout << nlohmann::json{{"trace_s", trace},
                                {"emit_s", seconds},
                                {"program_mb", static_cast<double>(text.size()) / 1e6}}
              << std::endl;
    return 0;
  }
  auto inputs_made = std::async(std::launch::async, [&] {  // during compilation, as the training loop does
    HostArrays values;
    for (const GraphInput& in : step.graph->inputs())
      values[in.name] = starting(step.params, in.name, in.value.shape());
    return values;
  });
  const Program program = compile(devices, *step.graph, compile_config, "bench_" + task->model());

  start = Clock::now();
  HostArrays values = inputs_made.get();
  ArrayMap state, read_only;
  place(devices, program, std::move(values), read_only);
  for (const std::string& input : program.input_names())
    if (step.graph->output_index(input) >= 0) state.insert(read_only.extract(input));
  const double initialise = since(start);

  double loss = 0;
  auto one_step = [&] {
    const auto from = Clock::now();
    ArrayMap out = program.run(state, read_only);
    loss = devices.get(out.at("loss")).to_doubles()[0];
    for (const char* metric : {"loss", "grad_norm", "learning_rate"}) out.erase(metric);
    state = std::move(out);
    return since(from);
  };
  const double first_step = one_step(), to_first_loss = seconds_since_start();
  std::vector<double> times, processor;
  for (int i = 0; i < steps; ++i) {
    const double from = processor_seconds();
    times.push_back(one_step());
    processor.push_back(processor_seconds() - from);
  }
  std::sort(times.begin(), times.end());
  std::sort(processor.begin(), processor.end());

  const CompileReport& report = program.report();
  nlohmann::json row = {{"program", name},
                        {"model", args[0]},
                        {"dtype", args[1]},
                        {"parameters", step.params.count()},
                        {"trace_s", trace},
                        {"emit_s", report.emit_seconds},
                        {"program_mb", static_cast<double>(report.program_bytes) / 1e6},
                        {"compile_s", report.from_cache ? 0 : report.compile_seconds},
                        {"load_s", report.load_seconds},
                        {"from_cache", report.from_cache},
                        {"initialise_s", initialise},
                        {"first_step_s", first_step},
                        {"to_first_loss_s", to_first_loss},
                        {"step_s", times.empty() ? 0.0 : times[times.size() / 2]},
                        {"fastest_s", times.empty() ? 0.0 : times.front()},
                        {"processor_s", processor.empty() ? 0.0 : processor[processor.size() / 2]},
                        {"peak_resident_mb", static_cast<double>(peak_resident()) / 1e6},
                        {"loss", loss}};
  if (traced > 0) {
    start_tracing();
    double all = 0;
    for (int i = 0; i < traced; ++i) all += one_step();
    std::map<std::string, double> seconds = {{"step", all / traced}};
    for (const TracedThread& thread : stop_tracing())
      for (const TracedSpan& span : thread.spans)
        seconds[span.name] += static_cast<double>(span.end_ns - span.start_ns) * 1e-9 / traced;
    row["spans"] = seconds;
  }
  if (auto plan = program.memory()) {
    row["planned_mb"] = static_cast<double>(plan->peak()) / 1e6;
    // Weights and moments are read and written, and intermediate results written and read.
    const Rates rates = measured_rates(devices, scope.activations);
    row["floor_s"] =
        step.flops / rates.flops + 2.0 * static_cast<double>(plan->arguments + plan->temporary) / rates.bytes;
  }
  row["gflop"] = step.flops / 1e9;
  std::cout << row.dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace md

int main(int argc, char** argv) {
  try {
    return md::run({argv + 1, argv + argc});
  } catch (const md::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
