#include "maxdiffusion/run/compile_ahead.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/run/compatibility.h"
#include "maxdiffusion/run/plan.h"

namespace md {
namespace {

/// Goes on in a child process, whose exit status becomes this one's. A compiler that meets a program it cannot take may
/// abort the process that it is in; here that becomes an error.
void go_on_in_a_child() {
  std::fflush(nullptr);
  const pid_t child = fork();
  check(child >= 0, Code::device, "compile: no process could be started: {}", std::strerror(errno));
  if (child == 0) return;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  fail(Code::device,
       "compile: the compiler ended its process with signal {} ({}); what it printed above says where. Another mesh, "
       "remat_policy or attention may avoid it",
       WTERMSIG(status), strsignal(WTERMSIG(status)));
}

std::string size(int64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  return mib < 1024 ? fmt::format("{:.1f} MiB", mib) : fmt::format("{:.2f} GiB", mib / 1024);
}

void print_report(const AheadOfTime& ahead, const pjrt::Topology& topology, const Mesh& mesh, double flops) {
  const double devices = static_cast<double>(mesh.devices());
  fmt::print("topology: {} × {}\n", mesh.devices(), topology.devices().front().kind);
  fmt::print("mesh: {}\n", mesh.describe());
  fmt::print("compiled in {:.1f} s, from {} bytes of StableHLO\n", ahead.report.compile_seconds,
             ahead.report.program_bytes);
  if (ahead.memory) {
    const MemoryPlan& m = *ahead.memory;
    fmt::print("on each device: arguments {}, outputs {} (in the arguments' place {}), temporary {}, code {}\n",
               size(m.arguments), size(m.outputs), size(m.aliased), size(m.temporary), size(m.code));
    const auto limit = topology.devices().front().memory_limit;
    fmt::print("together {}{}\n", size(m.peak()), limit ? fmt::format(" of {}", size(*limit)) : "");
  }
  fmt::print("work of a step: {:.4f} TFLOP on each device by the products of the model", flops / devices / 1e12);
  if (ahead.flops) fmt::print(", {:.4f} by the compiler's count", *ahead.flops / 1e12);
  fmt::print("\n");
  if (!ahead.collectives) return;
  for (const CollectiveSum& sum : *ahead.collectives) fmt::print("{}\n", to_string(sum));
}

}  // namespace

void compile_for_topology(const RunConfig& c) {
  check(!c.hardware.topology.empty(), Code::invalid_config,
        "compile: topology is empty; it names the hardware to compile for, such as topology=v5p:2x2x1");
  go_on_in_a_child();
  const pjrt::Topology topology =
      pjrt::Topology::create("tpu", c.hardware.topology, c.hardware.plugin, c.hardware.compile_topology_num_slices);
  const md::Topology seen = md::topology(topology);
  const Mesh mesh = Mesh::make(c.mesh, seen);
  // Models are opened on this machine's own device, for their configs.
  RunConfig here = c;
  here.hardware = {};
  here.mesh = {};
  const RunModels models(here, c.model.pretrained_model_name_or_path, Purpose::training);
  check_training_keys(c, *models.family());
  const AxisRules rules = axis_rules(c, models.family()->axis_rules());
  const DenoiseTask task = planned_task(
      c, models.family(), training_config(models.folder().scheduler_config(), c.scheduler), mesh.devices());
  const StepOptions options = planned_step(models, task.batch_size * c.update.gradient_accumulation_steps);
  for (const DenoiseTask& one : of_experts(c, task)) {
    const StepGraph step = trace_step(one, graph_options(mesh, seen, &rules), options);
    log_info("compiling the training step of {} for {}", one.model(), c.hardware.topology);
    print_report(compile_ahead(topology, mesh, *step.graph, c.compile, "train_" + one.model()), topology, mesh,
                 step.flops);
  }
}

}  // namespace md
