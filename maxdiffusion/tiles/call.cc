#include "maxdiffusion/tiles/call.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/tiles/mosaic.h"
#include "maxdiffusion/tiles/stablehlo.h"
#include "maxdiffusion/tiles/triton.h"

namespace md::tiles {

const OpDef kTileProgram = {
    .name = "tile_program",
    .infer =
        [](const InferCtx& c) {
          const Program& program = *c.attrs<Call>().program;
          size_t next = 0;
          for (const Memory& m : program.memories()) {
            if (m.space >= Space::output) continue;
            check(next < c.in.size() && c.in[next] == m.array, Code::invalid_graph,
                  "kernel '{}': '{}' is {}, expected {}", program.name(), m.name,
                  next < c.in.size() ? to_string(c.in[next]) : "missing", to_string(m.array));
            ++next;
          }
          check(next == c.in.size(), Code::invalid_graph, "kernel '{}': {} arrays, expected {}", program.name(),
                c.in.size(), next);
          return program.results();
        },
    .emit =
        [](EmitCtx& c) {
          const Program& program = *c.attrs<Call>().program;
          std::vector<Value> in;
          for (int i = 0; i < c.in_count(); ++i) in.push_back(c.in(i));
          const std::vector<Value> out = c.platform() == Platform::tpu   ? c.emit_call(mosaic_call(program), in)
                                         : c.platform() == Platform::gpu ? c.emit_call(triton_call(program), in)
                                                                         : print_stablehlo(c, program, in);
          for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
        },
    .flops = [](const Node& n) { return n.attrs<Call>().flops; },
};

std::vector<Tensor> call(const Program& program, const std::vector<Tensor>& arrays, double flops) {
  return apply_multi(kTileProgram, arrays, Call{std::make_shared<const Program>(program), flops});
}

}  // namespace md::tiles
