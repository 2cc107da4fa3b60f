// Memory and time of a run's steps as compiled, before the run needs devices or data: shared by `compile` and `plan`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/run/train_plan.h"

namespace md {

/// Continues in a child process and exits with its status. A compiler may abort its process on a program it does not
/// support; the parent then reports an error (device).
void continue_in_child_process();

/// Where the step runs: a topology, or the devices of this machine.
struct Place {
  std::unique_ptr<pjrt::Topology> topology;  // null: `devices`
  const Devices* devices = nullptr;
  Topology mesh_devices;
  Mesh mesh;
  std::optional<int64_t> memory;  // bytes per device
  const pjrt::PlatformDef* platform = nullptr;

  int64_t count() const { return mesh.devices(); }
  GraphOptions graph_options(const AxisRules& rules) const {
    return topology ? md::graph_options(mesh, mesh_devices, &rules) : devices->graph_options(&rules);
  }
  AheadOfTime compile(const Graph& graph, const CompileConfig& config, const std::string& name) const {
    return topology ? compile_ahead(*topology, mesh, graph, config, name)
                    : compile_ahead(*devices, graph, config, name);
  }
};
/// Throws invalid_config if the keys of GPUs, of TPUs and `hardware` contradict each other.
Place place_of(const DeviceRequest& r, const ModelComponents& models);

/// Whether the request is for the denoising step of sampling, not for training.
bool samples(const TrainingRequest& r);
/// The request for opening the models: on this machine's device, for their configs, if the step is compiled for others.
ComponentsRequest opened_for(const TrainingRequest& request);

/// A run's programs, traced for a place: one for its denoiser, or one per expert.
struct CompiledSteps {
  explicit CompiledSteps(const TrainingRequest& r);
  /// Description of the training or sampling step of model `i` for messages.
  std::string what(size_t i) const;
  AheadOfTime compile(size_t i) const;
  /// Throws out_of_memory if step `i` does not fit a device, as a compiler for real devices does.
  void check_fits(size_t i, const AheadOfTime& ahead) const;

  ModelComponents models;
  Place place;
  bool of_sampling, encodes;
  CompileConfig compiling;
  StepOptions step;
  std::vector<std::string> names;  // names of the models
  std::vector<StepGraph> graphs;
};

/// Prints the memory per device of a program, its FLOPs and the communication between devices. `flops`: of all devices.
void print_report(const CompiledSteps& steps, const AheadOfTime& ahead, double flops);

}  // namespace md
