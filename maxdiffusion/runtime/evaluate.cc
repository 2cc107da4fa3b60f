// Compiles and runs a graph in one call.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

std::vector<HostArray> evaluate(const Devices& devices, const Graph& graph, const std::vector<HostArray>& inputs) {
  const Program program = compile(devices, graph, CompileConfig{.jax_cache_dir = "off", .xla_flags = ""}, "evaluate");
  check(inputs.size() == graph.inputs().size(), Code::device, "evaluate: {} inputs given, the graph has {}",
        inputs.size(), graph.inputs().size());
  std::vector<Array> arrays;
  for (size_t i = 0; i < inputs.size(); ++i)
    arrays.push_back(devices.put(inputs[i], program.input_sharding(i), program.input_names()[i]));
  std::vector<Array*> pointers;
  for (Array& a : arrays) pointers.push_back(&a);
  std::vector<HostArray> out;
  for (const Array& a : program.run(pointers)) out.push_back(devices.get(a));
  return out;
}

}  // namespace md
