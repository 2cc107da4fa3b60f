// Compiles an attention kernel of maxdiffusion/ops/attention_tiles.h for a TPU that this machine need not have;
// bench/kernels.py reads the compiler's report on it. Arguments: topology, kernel (forward, gradient, dq, dkv;
// attention: one head and all its gradients, as a model calls them), length, head_dim, then key=value of
// flash_block_sizes and heads=, kv_heads=, type=, causal=.
#include <cmath>
#include <cstdio>
#include <map>
#include <string>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/attention.h"
#include "maxdiffusion/ops/attention_tiles.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/tiles/call.h"
#include "maxdiffusion/tiles/mosaic.h"

int main(int argc, char** argv) {
  using namespace md;
  try {
    check(argc > 4, Code::invalid_config, "kernel_bench TOPOLOGY KERNEL LENGTH HEAD_DIM [key=value…]");
    std::map<std::string, int64_t> parameters;
    for (int i = 5; i < argc; ++i) {
      const std::string word = argv[i];
      parameters[word.substr(0, word.find('='))] = std::stoll(word.substr(word.find('=') + 1));
    }
    const auto take = [&](const char* name, int64_t otherwise) {
      return parameters.contains(name) ? parameters[name] : otherwise;
    };
    const pjrt::Topology tpus = pjrt::Topology::create("tpu", argv[1]);
    TileAttention a{.heads = take("heads", 1),
                    .kv_heads = take("kv_heads", take("heads", 1)),
                    .queries = std::stoll(argv[3]),
                    .keys = take("keys", std::stoll(argv[3])),
                    .head_dim = std::stoll(argv[4])};
    a.scale = 1 / std::sqrt(static_cast<double>(a.head_dim));
    a.causal = take("causal", 0) != 0;
    a.limited = take("limited", 0) != 0;
    a.type = take("f32", 0) != 0 ? DType::f32 : DType::bf16;
    a.chip = tile_chip(tpus.devices()[0].kind);
    a.blocks = {.queries = take("block_q", 0),
                .keys = take("block_kv", 0),
                .gradient_queries = take("block_q_dkv", 0),
                .gradient_keys = take("block_kv_dkv", 0),
                .keys_compute = take("block_kv_compute", 0),
                .gradient_keys_compute = take("block_kv_dkv_compute", 0),
                .dq_queries = take("block_q_dq", 0),
                .dq_keys = take("block_kv_dq", 0)};
    const std::string what = argv[2];
    GraphOptions o;
    o.platform = Platform::tpu;
    o.device_kind = tpus.devices()[0].kind;
    Graph g(o);
    const auto temporary = [&] {
      const auto compiled = tpus.compile(to_stablehlo(g), {.device_ids = {tpus.devices()[0].id}, .flags = {}});
      return static_cast<double>(compiled.memory()->temporary) / (1 << 20);
    };
    if (what == "attention") {
      std::vector<Tensor> x;
      for (const char* name : {"q", "k", "v"}) x.push_back(g.input(name, {a.type, {1, a.queries, 1, a.head_dim}}));
      const Tensor y = cast(attention(x[0], x[1], x[2], {.kernel = "flash", .blocks = a.blocks}), DType::f32);
      int n = 0;
      for (Tensor t : grad(sum(y * y), x)) g.output("d" + std::to_string(n++), t);
      std::printf("compiled for %s; temporary %.1f MiB\n", tpus.devices()[0].kind.c_str(), temporary());
      return 0;
    }
    const tiles::Program program = what == "forward" ? tile_attention_program(a)
                                                     : tile_gradient_program(a, what == "gradient" ? TileGradient::fused
                                                                                : what == "dq"     ? TileGradient::dq
                                                                                                   : TileGradient::dkv);
    check(program.fast_memory() <= a.chip.fast_memory, Code::invalid_config,
          "the kernel's blocks take {} MiB of fast memory, expected at most {} MiB", program.fast_memory() >> 20,
          a.chip.fast_memory >> 20);
    std::vector<Tensor> in;
    for (const tiles::Memory& m : program.memories())
      if (m.space < tiles::Space::output) in.push_back(g.input(m.name, m.array));
    int n = 0;
    for (Tensor t : tiles::call(program, in)) g.output("y" + std::to_string(n++), t);
    if (parameters.contains("text")) std::puts(tiles::mosaic_text(program).c_str());
    std::printf("compiled for %s; estimated fast memory %.1f MiB, temporary %.1f MiB\n", tpus.devices()[0].kind.c_str(),
                static_cast<double>(program.fast_memory()) / (1 << 20), temporary());
  } catch (const Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
