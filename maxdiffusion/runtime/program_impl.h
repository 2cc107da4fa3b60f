// Internal to runtime/: the implementation of Program. compile.cc fills it, program.cc runs it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/pjrt/executable.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

std::optional<MemoryPlan> memory_plan(const pjrt::Compiled& compiled);

struct Program::Impl {
  struct Port {
    Shape shape;
    Sharding sharding;
    bool aliased = false;  // inputs: donated to an output
  };
  Devices devices;
  std::string name;
  std::vector<std::string> input_names, output_names;
  std::vector<Port> inputs, outputs;
  pjrt::Executable executable;
  std::vector<size_t> shard;  // shard of the k-th device of the executable
  CompileReport report;
};

}  // namespace md
