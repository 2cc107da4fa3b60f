// Compiles tile programs for TPUs and GPUs that this machine does not have.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/tiles/call.h"
#include "tests/topology.h"

namespace md {

/// A device to compile for: the arguments of pjrt::Topology::create.
struct Chip {
  const char *hardware, *topology, *device;
};
inline constexpr Chip kTpus[] = {
    {"tpu", "v5e:2x2", ""}, {"tpu", "v5p:2x2x1", ""}, {"tpu", "v6e:2x2", ""}, {"tpu", "tpu7x:2x2x1", ""}};
inline constexpr Chip kGpus[] = {{"gpu", "1x1x1", "h100"}, {"gpu", "1x1x1", "b200"}};

/// "" if a compiler for this hardware is installed, else what is missing.
inline std::string no_compiler(const char* hardware) {
  try {
    pjrt::Plugin::find(hardware);
    return "";
  } catch (const Error& e) {
    return fmt::format("nothing is compiled for {}: {}", hardware, e.message());
  }
}

/// Compiles programs as calls in one module for the topology's first device. `program` may read its kind.
inline pjrt::Compiled compile_for(const pjrt::Topology& chips, const std::vector<tiles::Program>& programs) {
  GraphOptions o;
  o.platform = chips.platform_name() == "tpu" ? Platform::tpu : Platform::gpu;
  o.device_kind = chips.devices()[0].kind;
  Graph g(o);
  int n = 0;
  for (const tiles::Program& p : programs) {
    std::vector<Tensor> in;
    for (const tiles::Memory& m : p.memories())
      if (m.space < tiles::Space::output) in.push_back(g.input(m.name + std::to_string(n++), m.array));
    for (Tensor t : tiles::call(p, in)) g.output("y" + std::to_string(n++), t);
  }
  return chips.compile(to_stablehlo(g), {.device_ids = {chips.devices()[0].id}, .flags = {}});
}

/// Expects that all programs compile for all chips; reports each that does not.
inline void expect_compiled(std::span<const Chip> chips,
                            const std::function<std::vector<tiles::Program>(const std::string& kind)>& programs) {
  for (const auto& [hardware, topology, device] : chips) {
    const pjrt::Topology absent = absent_devices(hardware, topology, "", 1, device);
    const std::vector<tiles::Program> all = programs(absent.devices()[0].kind);
    try {
      compile_for(absent, all);
    } catch (const Error&) {
      for (const tiles::Program& p : all) try {
          compile_for(absent, {p});
        } catch (const Error& e) {
          ADD_FAILURE() << topology << ' ' << device << ", kernel '" << p.name() << "': " << e.what();
        }
    }
  }
}

}  // namespace md
