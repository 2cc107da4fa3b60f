#include "maxdiffusion/commands/compiled_steps.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/generate.h"

namespace md {

void continue_in_child_process() {
  std::fflush(nullptr);
  const pid_t child = fork();
  check(child >= 0, Code::device, "compile: no process could be started: {}", std::strerror(errno));
  if (child == 0) return;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  fail(Code::device,
       "compile: the compiler crashed with signal {} ({}); see its lines above. Another mesh, remat_policy or "
       "attention may avoid it",
       WTERMSIG(status), strsignal(WTERMSIG(status)));
}

namespace {

/// Checks that keys of GPUs and of TPUs agree with `hardware`.
void check_gpu_keys(const HardwareKeys& keys) {
  check(keys.gpu_type.empty() || keys.hardware == "gpu", Code::invalid_config,
        "gpu_type is '{}' and hardware is {}; expected hardware=gpu, or no gpu_type", keys.gpu_type, keys.hardware);
  check(keys.gpu_type.empty() || !keys.topology.empty(), Code::invalid_config,
        "gpu_type is '{}' and topology is empty; expected topology=1x1x8, or no gpu_type for the GPUs of this machine",
        keys.gpu_type);
  if (keys.hardware != "gpu" || keys.topology.empty()) return;
  static const std::regex form("[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*");
  check(std::regex_match(keys.topology, form), Code::invalid_config,
        "topology is '{}'; expected numbers such as 1x1x8: one NVLink domain of one host with 8 GPUs", keys.topology);
  check(keys.compile_topology_num_slices <= 1, Code::invalid_config,
        "compile_topology_num_slices is {}; expected 1: of GPUs the first number of topology ('{}') is the number of "
        "domains",
        keys.compile_topology_num_slices, keys.topology);
}

}  // namespace

Place place_of(const DeviceRequest& r, const ModelComponents& models) {
  Place p;
  const HardwareKeys& keys = r.hardware;
  check_gpu_keys(keys);
  if (keys.topology.empty()) {
    p.devices = &models.devices();
    p.mesh_devices = topology(p.devices->client());
    p.mesh = p.devices->mesh();
    p.platform = &p.devices->client().platform();
    const auto memory = p.devices->client().memory(p.mesh.device_ids()[0]);
    if (memory && memory->limit) p.memory = memory->limit;
    if (!p.memory && p.devices->platform() == Platform::cpu) p.memory = memory_limit() / p.count();
    return p;
  }
  const std::string hardware = keys.hardware == "gpu" ? "gpu" : "tpu";
  if (hardware == "tpu") {
    // libtpu would query the cloud's metadata server and log its absence.
    setenv("TPU_SKIP_MDS_QUERY", "1", 0);
    setenv("TPU_ACCELERATOR_TYPE", "v5p-8", 0);
    setenv("TPU_WORKER_HOSTNAMES", "localhost", 0);
  }
  p.topology = std::make_unique<pjrt::Topology>(
      pjrt::Topology::create(hardware, keys.topology, keys.plugin, keys.compile_topology_num_slices, keys.gpu_type));
  p.mesh_devices = topology(*p.topology);
  p.mesh = Mesh::make(r.mesh, p.mesh_devices);
  p.platform = &pjrt::platform_for(hardware);
  p.memory = p.topology->devices().front().memory_limit;
  return p;
}

bool samples(const TrainingRequest& r) { return r.components.devices.hardware.compile_target == "sampling"; }

ComponentsRequest opened_for(const TrainingRequest& request) {
  ComponentsRequest r = request.components;
  if (samples(request)) r.model.purpose = Purpose::sampling;
  if (!r.devices.hardware.topology.empty()) r.devices.hardware = {}, r.devices.mesh = {};
  return r;
}

CompiledSteps::CompiledSteps(const TrainingRequest& r)
    : models(opened_for(r)),
      place(place_of(r.components.devices, models)),
      of_sampling(samples(r)),
      encodes(r.data.denoise.cache_latents_text_encoder_outputs),
      compiling(r.components.encoders.compile) {
  const AxisRules rules = axis_rules(r.components.devices, models.family()->spec().axis_rules);
  const GraphOptions placed = place.graph_options(rules);
  if (of_sampling) {
    const SampleOptions o = planned_sampling(models, r.sampling, place.count());
    step.scope = o.scope;
    compiling.minimize_memory = true;
    for (SamplingGraph& s : sampling_graphs(*models.family(), o, placed)) {
      names.push_back(s.denoiser);
      graphs.push_back({std::move(s.graph), std::move(s.params), {}, 0});
      std::vector<Tensor> results;
      for (const GraphOutput& out : graphs.back().graph->outputs()) results.push_back(out.value);
      graphs.back().flops = count_flops(*graphs.back().graph, results);
    }
    return;
  }
  step.scope = models.denoiser_options();  // throws if the devices do not support the quantization
  const TrainPlan plan = plan_training(r, models.folder(), models.family(), {place.count()});
  step = plan.loop.step;
  for (const DenoiseTask& one : plan.tasks) {
    names.push_back(one.model());
    graphs.push_back(trace_step(one, placed, step));
  }
}

std::string CompiledSteps::what(size_t i) const {
  return fmt::format("the {} of {}", of_sampling ? "sampling step" : "training step", names[i]);
}

AheadOfTime CompiledSteps::compile(size_t i) const {
  log_info("compiling {} for {} × {}", what(i), place.count(), place.mesh_devices.device_kind);
  // Uses the program names of a run, so that the run finds the executables in aot_cache_dir.
  return place.compile(*graphs[i].graph, compiling, of_sampling ? "denoise" : "train_" + names[i]);
}

void CompiledSteps::check_fits(size_t i, const AheadOfTime& ahead) const {
  const auto& limit = place.memory;
  check(!ahead.memory || !limit || ahead.memory->peak() <= *limit, Code::out_of_memory,
        "{} takes {} on each device, which has {}", what(i), bytes_text(ahead.memory ? ahead.memory->peak() : 0),
        bytes_text(limit.value_or(0)));
}

void print_report(const CompiledSteps& steps, const AheadOfTime& ahead, double flops) {
  const Place& p = steps.place;
  fmt::print("topology: {} × {}\n", p.count(), p.mesh_devices.device_kind);
  fmt::print("mesh: {}\n", p.mesh.describe());
  fmt::print("compiled in {:.1f} s, from {} bytes of StableHLO\n", ahead.report.compile_seconds,
             ahead.report.program_bytes);
  if (ahead.memory) {
    const MemoryPlan& m = *ahead.memory;
    fmt::print("on each device: arguments {}, outputs {} (in the arguments' place {}), temporary {}, code {}\n",
               bytes_text(m.arguments), bytes_text(m.outputs), bytes_text(m.aliased), bytes_text(m.temporary),
               bytes_text(m.code));
    if (m.host > 0) fmt::print("in the host's memory for each device: {}\n", bytes_text(m.host));
    fmt::print("together {}{}\n", bytes_text(m.peak()), p.memory ? fmt::format(" of {}", bytes_text(*p.memory)) : "");
  }
  fmt::print("work of a step: {:.4f} TFLOP on each device by the products of the model",
             flops / static_cast<double>(p.count()) / 1e12);
  if (ahead.flops) fmt::print(", {:.4f} by the compiler's count", *ahead.flops / 1e12);
  fmt::print("\n");
  if (ahead.bytes_accessed && ahead.estimated_seconds.value_or(0) > 0)
    fmt::print("by the compiler's count {} read and written, {:.3f} ms; loops as one trip\n",
               bytes_text(static_cast<int64_t>(*ahead.bytes_accessed)), *ahead.estimated_seconds * 1e3);
  if (!ahead.products.empty()) {
    std::string products;
    for (const auto& [types, n] : ahead.products)
      products += fmt::format("{}{}: {}", products.empty() ? "" : ", ", types, n);
    fmt::print("products {}\n", products);
  }
  if (ahead.instructions > 0)
    fmt::print("instructions that the program starts: {}, of which {} only change a type\n", ahead.instructions,
               ahead.type_changes);
  if (!ahead.turned.empty()) {
    double bytes = 0;
    for (const pjrt::Turned& t : ahead.turned) bytes += static_cast<double>(t.bytes) * t.times;
    fmt::print("arrays whose axes are put into another order in memory: {}, {}\n", ahead.turned.size(),
               bytes_text(static_cast<int64_t>(bytes)));
  }
  if (!ahead.host_copies.empty()) {
    double bytes = 0, overlapped = 0;
    for (const pjrt::HostCopy& c : ahead.host_copies) {
      bytes += c.bytes_of_run();
      if (c.overlapped > 0) overlapped += c.bytes_of_run();
    }
    fmt::print("copied from the host's memory: {} in {} operations, of which {} while products or others run\n",
               bytes_text(static_cast<int64_t>(bytes)), ahead.host_copies.size(),
               bytes_text(static_cast<int64_t>(overlapped)));
  }
  if (!ahead.cache_file.empty()) fmt::print("kept for such devices: {}\n", ahead.cache_file);
  for (const auto& [target, calls] : ahead.custom_calls)
    fmt::print("custom calls of {}: {} operations, {:g} runs\n", target, calls.operations, calls.runs);
  if (!ahead.collectives) return;
  for (const CollectiveSum& sum : *ahead.collectives)
    fmt::print("{}; most of it {}\n", to_string(sum), largest(sum, 3));
}

}  // namespace md
