// Values that a policy offloads are stored in host memory: compiled for TPUs that this machine does not have and
// checked by the compiler's statistics. Needs libtpu, which `./run test` fetches.
#include <fmt/core.h>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/pjrt/topology.h"
#include "tests/autodiff/gradient_check.h"
#include "tests/topology.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

constexpr int64_t kLayers = 8, kRows = 4096, kWidth = 512, kHidden = 1024;

/// Traces the gradients of layers of two products with an activation between, in a loop over their stacked weights.
void trace(Graph& g, const RematPolicy& policy) {
  const Tensor x = g.input("x", f32({kRows, kWidth}), {axis::kBatch, ""}),
               first = g.input("first", f32({kLayers, kWidth, kHidden}), {"", "", ""}),
               second = g.input("second", f32({kLayers, kHidden, kWidth}), {"", "", ""});
  auto layer = [](const std::vector<Tensor>& v) {
    Tensor h = named(v[0], value::kHiddenStates);
    Tensor y = named(sin(matmul(tanh(h), v[1])), value::kFfnActivation);
    return std::vector<Tensor>{h + 0.1 * matmul(sin(y), v[2])};
  };
  const ScanResult r = scan(kLayers, {x}, [&](ScanStep& step, const std::vector<Tensor>& carry) {
    return ScanResult{checkpoint(policy, layer, {carry[0], step.slice(first), step.slice(second)}), {}};
  });
  int i = 0;
  for (Tensor t : grad(mean(square(r.carry[0])), {first, second})) g.output(std::to_string(i++), t);
}

/// Compiles for four devices that split the rows.
MemoryPlan on_tpus(const RematNames& names) {
  static const pjrt::Topology tpus = absent_devices("tpu", "v5p:2x2x1");
  const Mesh mesh = Mesh::make({}, topology(tpus));
  const AxisRules rules = AxisRules::defaults();
  Graph g(graph_options(mesh, topology(tpus), &rules));
  trace(g, remat_policy("CUSTOM", names));
  return compile_ahead(tpus, mesh, g, {}, "offload").memory.value();
}

// S0-68, S0-73, S2-44
TEST(Offload, WaitsInTheHostsMemory) {
  const MemoryPlan saved = on_tpus({.saved = {value::kFfnActivation}, .offloaded = {}}),
                   away = on_tpus({.saved = {}, .offloaded = {value::kFfnActivation, value::kHiddenStates}});
  // The loop carry, which the layers read, is offloaded too; otherwise it would always be on the device.
  const double bytes = static_cast<double>(kLayers * kRows * (kWidth + kHidden) * 4) / 4;
  fmt::print("  bytes offloaded {:.0f}; temporary kept {}, away {}; of the host {}\n", bytes, saved.temporary,
             away.temporary, away.host);
  EXPECT_EQ(saved.host, 0);
  EXPECT_GE(static_cast<double>(away.host), 0.9 * bytes);
  EXPECT_LE(static_cast<double>(away.host), 1.1 * bytes);  // each value once
  EXPECT_LE(static_cast<double>(away.temporary), static_cast<double>(saved.temporary) - 0.8 * bytes);
}

}  // namespace
}  // namespace md
