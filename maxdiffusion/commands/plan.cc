// `plan`: the memory and time of a training step, and which keys make it fit.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/compiled_steps.h"
#include "maxdiffusion/settings/memory_fit.h"

namespace md {
namespace {

struct PlanKeys {
  std::vector<std::string> fit;
  template <class V>
  void visit(V&& v) {
    v("fit", fit,
      "print the keys of the fastest combination that fits this much memory of a device: auto (what it has) or sizes, "
      "such as 8GB,24GB");
  }
};

/// Bytes of a graph's inputs on one device, by kind.
struct StateBytes {
  int64_t trained = 0, frozen = 0, moments = 0, copies = 0, averages = 0, batch = 0, gradients = 0;
};

StateBytes state_bytes(const StepGraph& s, const Mesh& mesh, const StepOptions& o) {
  StateBytes in_use;
  std::map<std::string, const Param*> params;
  for (const Param& p : s.params.params()) params[p.input] = &p;
  const std::vector<StateSlot> slots = optimizer_slots(o.optim);
  for (const GraphInput& in : s.graph->inputs()) {
    if (in.in_host_memory) continue;
    const int64_t elements = shard_of(mesh, Sharding{in.sharding}, in.value.dims(), 0, in.name).elements();
    const int64_t bytes = elements * static_cast<int64_t>(size_of(in.value.dtype()));
    const auto param = params.find(in.name);
    if (param == params.end()) {
      auto is = [&](const char* prefix) { return in.name.starts_with(prefix); };
      const bool slot = std::ranges::any_of(slots, [&](const StateSlot& k) { return is(k.prefix); });
      (slot                         ? in_use.moments
       : is(state_prefix::kMaster)  ? in_use.copies
       : is(state_prefix::kAverage) ? in_use.averages
                                    : in_use.batch) += bytes;
    } else if (!param->second->trainable) {
      in_use.frozen += bytes;
    } else {
      in_use.trained += bytes;
      const DType type = o.accumulation > 1 ? DType::f32 : in.value.dtype();
      in_use.gradients += elements * static_cast<int64_t>(std::max(size_of(type), size_of(o.scope.activations)));
    }
  }
  return in_use;
}

void print_parts(const StateBytes& h, const MemoryPlan& m) {
  const int64_t named = h.trained + h.frozen + h.moments + h.copies + h.averages + h.batch;
  fmt::print(
      "arguments: weights {} trained and {} frozen, moments {}, f32 copies {}, averages {}, batch {}, padding {}\n",
      bytes_text(h.trained), bytes_text(h.frozen), bytes_text(h.moments), bytes_text(h.copies), bytes_text(h.averages),
      bytes_text(h.batch), bytes_text(std::max<int64_t>(0, m.arguments - named)));
  fmt::print("temporary: gradients {}, activations and all else {}\n", bytes_text(h.gradients),
             bytes_text(std::max<int64_t>(0, m.temporary - h.gradients)));
}

/// Prints the cost of the run around the step: checkpoints, and encoding a dataset.
void print_beside(const StateBytes& h, const CompiledSteps& steps, const StepGraph& step) {
  int64_t largest = 0;
  for (const GraphInput& in : step.graph->inputs()) largest = std::max(largest, in.value.shape().bytes());
  const int64_t state = h.trained + h.moments + h.copies + h.averages;
  fmt::print(
      "saving a checkpoint: of {} on each device, {} of the host's memory at a time; all of them where they are free, "
      "to "
      "write while training continues\n",
      bytes_text(state), bytes_text(largest));
  const int64_t batch = steps.models.options().keys.encoder_batch_size;
  if (steps.encodes)
    fmt::print(
        "encoding a data set: {} of memory at a time in addition to the autoencoder{}\n",
        batch > 0 ? fmt::format("{} samples", batch) : bytes_text(ModelComponents::encoder_bytes(state + h.frozen)),
        batch > 0 ? "" : ", or what one sample takes");
}

/// Seconds for one kind of collective on all devices at once. Rings: gathered bytes pass each device once, reduced ones
/// twice, and exchanged ones travel a quarter of the ring on average.
double seconds_of(const CollectiveSum& sum, const Mesh& mesh, const pjrt::DeviceRates& rates) {
  double n = 1;
  for (const std::string& axis : sum.axes) n *= static_cast<double>(mesh.size(axis));
  const double rate = sum.between_slices ? rates.network : rates.axis, part = (n - 1) / n;
  if (sum.kind == "all-reduce") return 2 * part * sum.bytes / rate;
  if (sum.kind == "all-to-all") return n / 4 * sum.bytes / rate;
  if (sum.kind == "collective-permute") return 2 * sum.bytes / rate;  // only one of the two directions
  return part * sum.bytes / rate;
}

void print_roofline(const CompiledSteps& steps, const AheadOfTime& ahead, double flops) {
  const Place& p = steps.place;
  const auto rates = p.platform->rates(p.mesh_devices.device_kind);
  auto peak = p.platform->peak_flops(p.mesh_devices.device_kind, steps.step.scope.activations);
  // TPUs multiply f32 as bf16 unless a higher precision is set.
  if (!peak) peak = p.platform->peak_flops(p.mesh_devices.device_kind, DType::bf16);
  if (!rates || !peak) {
    fmt::print("predicted step time: no rates are known of {}\n", p.mesh_devices.device_kind);
    return;
  }
  const double products = flops / static_cast<double>(p.count()) / *peak;
  double within = 0, between = 0;
  for (const CollectiveSum& sum : ahead.collectives.value_or(std::vector<CollectiveSum>()))
    (sum.between_slices ? between : within) += seconds_of(sum, p.mesh, *rates);
  const double memory = ahead.bytes_accessed.value_or(0) / rates->memory;
  double copies = 0;  // from the host's memory
  if (rates->host > 0)
    for (const pjrt::HostCopy& c : ahead.host_copies) copies += c.bytes_of_run() / rates->host;
  fmt::print(
      "predicted step time: at least {:.4f} s (products {:.4f} at the peak, memory {:.4f}, messages within a slice "
      "{:.4f}, between slices {:.4f}{}), {:.4f} s where none overlaps\n",
      std::max({products, memory, within, between, copies}), products, memory, within, between,
      copies > 0 ? fmt::format(", copies from the host's memory {:.4f}", copies) : "",
      products + memory + within + between + copies);
  if (ahead.cycles == 0 || rates->cycles == 0) return;
  const double operations = ahead.cycles / rates->cycles, kernels = ahead.kernel_flops / *peak,
               whole = operations + kernels + within + between;
  fmt::print(
      "predicted step time by the compiler's schedule: {:.4f} s (operations {:.4f}, attention kernels {:.4f} at the "
      "peak, messages {:.4f} where none overlaps), {:.0f} % of the peak's FLOPs are the model's\n",
      whole, operations, kernels, within + between, 100 * products / whole);
}

AheadOfTime fitting(const CompiledSteps& steps, size_t i) {
  AheadOfTime ahead = steps.compile(i);
  steps.check_fits(i, ahead);
  return ahead;
}

TrainingRequest changed(TrainingRequest r, const MemoryKeys& keys) {
  r.components.encoders.layers = keys.layers;
  r.components.devices.mesh = keys.mesh;
  r.data.batches = keys.batches;
  r.learning.update.gradient_accumulation_steps = keys.accumulation;
  r.learning.optim.optimizer = keys.optimizer;
  r.sampling.batch = {keys.batches.per_device_batch_size, keys.batches.global_batch_size};
  return r;
}

MemoryKeys memory_keys(const TrainingRequest& r) {
  return {r.components.encoders.layers, r.components.devices.mesh, r.data.batches,
          r.learning.update.gradient_accumulation_steps, r.learning.optim.optimizer};
}

/// Largest peak memory in bytes on a device over the programs. `within`: as in `fitting`.
int64_t compiled_peak(const CompiledSteps& steps, bool within) {
  int64_t most = 0;
  for (size_t i = 0; i < steps.graphs.size(); ++i) {
    const AheadOfTime ahead = within ? fitting(steps, i) : steps.compile(i);
    if (ahead.memory) most = std::max(most, ahead.memory->peak());
  }
  return most;
}

/// Tries the changes until one fits; adds one line for each as a note to `e`.
void try_changes(const TrainingRequest& r, const Place& place, Error& e) {
  const bool offloads = place.mesh_devices.platform != "cpu";
  for (const MemorySuggestion& change : memory_suggestions(memory_keys(r), place.mesh, !samples(r), offloads)) try {
      const int64_t most = compiled_peak(CompiledSteps(changed(r, change.keys)), true);
      fmt::print("with {}: it fits, {} on each device\n", change.words, bytes_text(most));
      e.note(fmt::format("try: {}", change.words));
      return;
    } catch (const Error& refused) {
      const std::string& why = refused.message();
      fmt::print("with {}: {}\n", change.words, why.substr(0, why.find('\n')));
    }
  e.note("try: more devices, or a smaller model or size; none of the changes above is enough");
}

/// `plan`: compiles the training step for the devices of the keys, or of this machine if they name no topology, and
/// prints its cost as `compile` does, and the parts of the memory; for chips with known rates also a lower bound of the
/// seconds per step. If the step does not fit, tries the changes that commonly help one by one; out_of_memory then
/// names the first that makes it fit.
void plan(const TrainingRequest& r) {
  continue_in_child_process();
  const CompiledSteps steps(r);
  for (size_t i = 0; i < steps.graphs.size(); ++i) {
    const StepGraph& step = steps.graphs[i];
    int64_t trained = 0;
    for (const Param& p : step.params.params())
      if (p.trainable) trained += p.shape.elements();
    fmt::print("{}: {} parameters, of which {} are trained\n", steps.names[i], step.params.count(), trained);
    try {
      const AheadOfTime ahead = fitting(steps, i);
      print_report(steps, ahead, step.flops);
      if (ahead.memory) {
        const StateBytes in_use = state_bytes(step, steps.place.mesh, steps.step);
        print_parts(in_use, *ahead.memory);
        if (!samples(r)) print_beside(in_use, steps, step);
      }
      print_roofline(steps, ahead, step.flops);
    } catch (Error& e) {
      if (e.code() == Code::out_of_memory) try_changes(r, steps.place, e);
      throw;
    }
  }
}

/// For each of `sizes` (auto: the device's memory), prints the keys of the fastest combination that fits as YAML, with
/// comments about the attempts. Throws out_of_memory, after all sizes, if nothing fits one of them.
void plan_fit(const TrainingRequest& r, const std::vector<std::string>& sizes) {
  continue_in_child_process();
  std::optional<int64_t> memory;
  bool offloads = false;
  int64_t blocks = std::numeric_limits<int64_t>::max();
  {
    const ModelComponents models(opened_for(r));
    LayerKeys stacked = r.components.encoders.layers;
    stacked.scan_layers = true;
    const std::vector<std::string>& denoisers = models.family()->spec().denoisers;
    const ParamTable params = models.folder().params(denoisers, scope_options(stacked));
    for (const std::string& denoiser : denoisers) blocks = std::min(blocks, params.blocks(denoiser));
    const Place place = place_of(r.components.devices, models);
    memory = place.memory;
    offloads = place.mesh_devices.platform != "cpu";
    fmt::print("# {} × {}, {}\n", place.count(), place.mesh_devices.device_kind, place.mesh.describe());
  }
  std::vector<int64_t> limits;
  for (const std::string& text : sizes) {
    check(text != "auto" || memory, Code::invalid_config,
          "fit is auto and the device's memory is not known; expected a size, such as fit=24GB");
    limits.push_back(text == "auto" ? *memory : memory_size("fit", text));
  }
  const std::vector<MemoryChange> changes =
      memory_changes(memory_keys(r), !samples(r), samples(r) || r.learning.lora.train_lora, offloads, blocks);
  std::map<std::vector<size_t>, MemoryNeed> compiled;
  const auto need = [&](const std::vector<size_t>& set) -> MemoryNeed {
    if (const auto done = compiled.find(set); done != compiled.end()) return done->second;
    fmt::print("# {}: ", set.empty() ? "as configured" : words_of(settings_of(changes, set)));
    MemoryNeed& n = compiled[set];
    try {
      MemoryKeys keys = memory_keys(r);
      for (size_t i : set) changes[i].apply(keys);
      n = compiled_peak(CompiledSteps(changed(r, keys)), false);
      fmt::print("{} on each device", bytes_text(*n));
      const auto before = set.empty() ? compiled.end() : compiled.find({set.begin(), set.end() - 1});
      if (before != compiled.end() && before->second.value_or(kMoreThanADevice) != kMoreThanADevice)
        fmt::print("; {} saves {}", words_of(changes[set.back()].settings), bytes_text(*before->second - *n));
      fmt::print("\n");
    } catch (const Error& e) {
      if (e.code() == Code::out_of_memory) n = kMoreThanADevice;
      if (!n && set.empty()) throw;
      fmt::print("{}\n", e.message().substr(0, e.message().find('\n')));
    }
    std::fflush(stdout);
    return n;
  };
  std::string missed;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const MemoryFit fit = fit_memory(changes, limits[i], need);
    if (!fit.best) {
      int64_t least = kMoreThanADevice;
      for (const MemoryTrial& t : fit.trials) least = std::min(least, t.need.value_or(least));
      missed += fmt::format("{}fit={}: no combination takes at most {}{}", missed.empty() ? "" : "; ", sizes[i],
                            bytes_text(limits[i]),
                            least == kMoreThanADevice ? "" : "; the smallest takes " + bytes_text(least));
      continue;
    }
    double slower = 1;
    for (size_t c : fit.best->changes) slower *= 1 + changes[c].cost;
    fmt::print("# fit={}: {} of {} on each device, steps of about {:.0f} % of the time as configured\n", sizes[i],
               bytes_text(*fit.best->need), bytes_text(limits[i]), 100 * slower);
    for (const auto& [key, value] : settings_of(changes, fit.best->changes)) fmt::print("{}: {}\n", key, value);
  }
  if (!missed.empty()) throw Error(Code::out_of_memory, missed).note("try: more devices, or a smaller model or size");
}

}  // namespace

Command plan_command() {
  return {
      "plan", "CONFIG [fit=auto|24GB] [topology=v5p:2x2x1] [key=value …]",
      "report the memory and time of a training step on each device and, if it does not fit, what would make it fit; "
      "with fit, print the keys of the fastest combination that fits the memory",
      [](const Words& words) {
        PlanKeys keys;
        const TrainingRequest r = training_request(config_of("plan", take_keys(words, keys)));
        const std::vector<std::string> sizes = split_at_commas(keys.fit);
        sizes.empty() ? plan(r) : plan_fit(r, sizes);
      },
      [](const KeyPrinter& print) {
        print_command_keys<PlanKeys>(print);
        print_all_config_keys(print);
      }};
}

}  // namespace md
