// Compiles tile programs for TPUs that this machine does not have.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/tiles/call.h"
#include "tests/topology.h"

namespace md {

/// One topology per generation, in the plugin's notation.
inline constexpr const char* kChips[] = {"v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"};

/// "" if a TPU compiler is installed, else what is missing.
inline std::string no_tpu_compiler() {
  try {
    pjrt::Plugin::find("tpu");
    return "";
  } catch (const Error& e) {
    return "libtpu is not there (cmake/wheels_tpu.txt); nothing is compiled for TPUs: " + e.message();
  }
}

/// Compiles programs as calls in one module for the topology's first device. `program` may read its kind.
inline pjrt::Compiled compile_for(const pjrt::Topology& tpus, const std::vector<tiles::Program>& programs) {
  GraphOptions o;
  o.platform = Platform::tpu;
  o.device_kind = tpus.devices()[0].kind;
  Graph g(o);
  int n = 0;
  for (const tiles::Program& p : programs) {
    std::vector<Tensor> in;
    for (const tiles::Memory& m : p.memories())
      if (m.space < tiles::Space::output) in.push_back(g.input(m.name + std::to_string(n++), m.array));
    for (Tensor t : tiles::call(p, in)) g.output("y" + std::to_string(n++), t);
  }
  return tpus.compile(to_stablehlo(g), {.device_ids = {tpus.devices()[0].id}, .flags = {}});
}

/// Expects that all programs compile for all chips; reports each that does not.
inline void expect_compiled(const std::function<std::vector<tiles::Program>(const std::string& kind)>& programs) {
  for (const char* chip : kChips) {
    const pjrt::Topology tpus = absent_devices("tpu", chip);
    const std::vector<tiles::Program> all = programs(tpus.devices()[0].kind);
    try {
      compile_for(tpus, all);
    } catch (const Error&) {
      for (const tiles::Program& p : all) try {
          compile_for(tpus, {p});
        } catch (const Error& e) {
          ADD_FAILURE() << chip << ", kernel '" << p.name() << "': " << e.what();
        }
    }
  }
}

}  // namespace md
