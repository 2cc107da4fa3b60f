// `compile`: compiles the training step for devices that are not attached.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/compiled_steps.h"

namespace md {
namespace {

/// Compiles the training step for the devices of the key `topology`, without such a device, weights or data, and prints
/// its cost there: bytes per device, work, and communication. Throws invalid_config (no topology, a mesh that does not
/// match it), device (no compiler for it; the compiler crashed), and out_of_memory with the compiler's numbers if the
/// step does not fit.
void compile_for_topology(const TrainingRequest& r) {
  check(!r.components.devices.hardware.topology.empty(), Code::invalid_config,
        "compile: topology is empty; expected the hardware to compile for: topology=v5p:2x2x1, or hardware=gpu "
        "topology=1x1x8 gpu_type=h100");
  continue_in_child_process();
  const CompiledSteps steps(r);
  for (size_t i = 0; i < steps.graphs.size(); ++i) {
    const AheadOfTime ahead = steps.compile(i);
    print_report(steps, ahead, steps.graphs[i].flops);
    steps.check_fits(i, ahead);
  }
}

}  // namespace

Command compile_command() {
  return {"compile", "CONFIG topology=v5p:2x2x1 | hardware=gpu topology=1x1x8 gpu_type=h100 [key=value …]",
          "compile the training step for TPUs or GPUs that are not attached, and report its memory and work",
          [](const Words& words) { compile_for_topology(training_request(config_of("compile", words))); },
          print_all_config_keys};
}

}  // namespace md
