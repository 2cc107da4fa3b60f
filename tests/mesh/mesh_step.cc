#include "tests/mesh/mesh_step.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/qwen_image_transformer.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/pjrt/executable.h"
#include "tests/mesh/update_step.h"

namespace md {
namespace {

UNetConfig small_unet() {
  return UNetConfig::from_json(parse_json(R"({
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "in_channels": 4, "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [32, 64], "layers_per_block": 1, "transformer_layers_per_block": [1, 1],
    "mid_block_type": null,
    "attention_head_dim": [2, 4], "cross_attention_dim": 32, "norm_num_groups": 8, "use_linear_projection": true,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64
  })"));
}

/// A timestep per token (16), image and text conditions, blocks in one loop.
WanTransformerConfig small_wan() {
  return WanTransformerConfig::from_json(parse_json(R"({
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 6, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 64, "num_layers": 2, "image_dim": 16, "added_kv_proj_dim": 32
  })"));
}

/// Double-stream, then single-stream blocks; each type in one loop.
FluxTransformerConfig small_flux() {
  return FluxTransformerConfig::from_json(parse_json(R"({
    "num_attention_heads": 4, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 4], "in_channels": 8, "num_layers": 2,
    "num_single_layers": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16, "guidance_embeds": true
  })"));
}

Flux2TransformerConfig small_flux2() {
  return Flux2TransformerConfig::from_json(parse_json(R"({
    "num_attention_heads": 4, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 2, 2], "in_channels": 8,
    "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16, "guidance_embeds": false
  })"));
}

/// Blocks for images and for texts in one loop each, then blocks for both.
ZImageTransformerConfig small_z_image() {
  return ZImageTransformerConfig::from_json(parse_json(R"({
    "dim": 48, "n_heads": 4, "axes_dims": [4, 4, 4], "axes_lens": [80, 8, 8], "in_channels": 4, "n_layers": 2,
    "n_refiner_layers": 2, "cap_feat_dim": 16
  })"));
}

/// Double-stream blocks in one loop.
QwenImageTransformerConfig small_qwen_image() {
  return QwenImageTransformerConfig::from_json(parse_json(R"({
    "num_attention_heads": 4, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 4], "in_channels": 8, "out_channels": 2,
    "num_layers": 2, "joint_attention_dim": 16
  })"));
}

HostArray normals(const Shape& shape, const std::string& purpose) {
  const HostRng rng(1, purpose);
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  rng.fill(HostRng::Distribution::normal, 1, 0, values);
  return HostArray::of<float>(shape, values);
}

HostArray zeros(const Shape& shape) {
  HostArray a(shape);
  std::fill_n(a.mutable_data(), a.bytes(), std::byte{0});
  return a;
}

struct Step {
  Graph graph;
  ParamTable params;
};

/// Mean square error of the prediction against a fixed target; AdamW.
void trace(Step& s, MeshModel model, int64_t rows, ScopeOptions options) {
  Graph& g = s.graph;
  auto batch = [&](const char* name, Dims dims) {
    dims.insert(dims.begin(), rows);
    LogicalAxes axes(dims.size());
    axes[0] = axis::kData;
    return g.input(name, {DType::f32, dims}, axes);
  };
  Tensor step = g.input("step", {DType::s32, {}});
  Tensor difference;
  if (model == MeshModel::unet) {
    const UNetInputs in{.sample = batch("sample", {8, 8, 4}),
                        .timestep = batch("timestep", {}),
                        .encoder_hidden_states = batch("text", {6, 32}),
                        .text_embeds = batch("pooled", {16}),
                        .time_ids = batch("time_ids", {6})};
    const Tensor target = batch("target", {8, 8, 4});
    difference = unet2d(Scope(g, s.params, "unet", options), small_unet(), in) - target;
  } else if (model == MeshModel::flux) {
    const FluxInputs in{.sample = batch("sample", {8, 8}),
                        .rows = 2,
                        .columns = 4,
                        .timestep = batch("timestep", {}),
                        .text = batch("text", {8, 16}),
                        .pooled = batch("pooled", {16}),
                        .guidance = batch("guidance", {})};
    const Tensor target = batch("target", {8, 8});
    options.scan_layers = true;
    difference = flux_transformer(Scope(g, s.params, "transformer", options), small_flux(), in) - target;
  } else if (model == MeshModel::flux2) {
    const Flux2Inputs in{.sample = batch("sample", {4, 3, 8}),
                         .timestep = batch("timestep", {}),
                         .text = batch("text", {8, 16}),
                         .references = {batch("reference", {2, 6, 8})}};
    const Tensor target = batch("target", {4, 3, 8});
    options.scan_layers = true;
    difference = flux2_transformer(Scope(g, s.params, "transformer", options), small_flux2(), in) - target;
  } else if (model == MeshModel::z_image) {
    const ZImageInputs in{.sample = batch("sample", {8, 8, 4}),
                          .time = batch("time", {}),
                          .text = batch("text", {64, 16}),
                          .lengths = iota(g, {DType::s32, {rows}}, 0) * 4 + 3};  // 3, 7, … tokens
    const Tensor target = batch("target", {8, 8, 4});
    options.scan_layers = true;
    difference = z_image_transformer(Scope(g, s.params, "transformer", options), small_z_image(), in) - target;
  } else if (model == MeshModel::qwen_image) {
    const QwenImageInputs in{.sample = batch("sample", {16, 8}),
                             .rows = 4,
                             .columns = 4,
                             .timestep = batch("timestep", {}),
                             .text = batch("text", {32, 16}),
                             .lengths = iota(g, {DType::s32, {rows}}, 0) * 4 + 3};  // 3, 7, … tokens
    const Tensor target = batch("target", {16, 8});
    options.scan_layers = true;
    difference = qwen_image_transformer(Scope(g, s.params, "transformer", options), small_qwen_image(), in) - target;
  } else {
    const WanInputs in{.sample = batch("sample", {2, 4, 8, 6}),
                       .timestep = batch("timestep", {16}),
                       .text = batch("text", {6, 16}),
                       .image = batch("image", {5, 16})};
    const Tensor target = batch("target", {2, 4, 8, 4});
    options.scan_layers = true;
    const Scope scope(g, s.params, "transformer", options);
    difference = wan_transformer(scope, small_wan(), in) - target;
  }
  const Tensor loss = mean(square(difference));
  OptimConfig optim;
  optim.learning_rate = 1e-3;
  optim.lr_scheduler = "constant";
  optim.optimizer_arg<double>("adam_eps") =
      1e-4;  // large, so that noise in a gradient near zero does not become a whole step
  update_step(g, s.params, loss, optim, step);
  g.output("step", step + 1.0, "step");
  g.alias("step", "step");
  g.output("loss", loss);
}

/// Initial value of an input. Biases are nonzero too, so that every relative error is meaningful.
HostArray starting(const Step& s, const std::string& name, const Shape& shape) {
  if (name == "step") return zeros(shape);
  if (name.starts_with("adam_")) return zeros(shape);
  const Param* p = s.params.find(name);
  HostArray a = normals(shape, name);
  if (name == "timestep" || name == "time_ids")
    for (float& v : a.mutable_view<float>()) v = 500 + 100 * v;
  if (!p) return a;
  const int64_t first = p->stacked > 0 ? 1 : 0;  // dims without the layer axis
  int64_t fan_in = 1;
  for (int64_t i = first + 1; i < shape.rank(); ++i) fan_in *= shape.dim(i);
  if (shape.rank() <= first + 1) fan_in = 0;
  const bool scale = p->init == init::ones();
  for (float& v : a.mutable_view<float>())
    v = fan_in ? v / std::sqrt(static_cast<float>(fan_in)) : (scale ? 1.0f : 0.0f) + 0.1f * v;
  return a;
}

}  // namespace

MeshRun run_on(const Devices& devices, const AxisRules& rules, int steps, MeshModel model, const std::string& attention,
               bool windows, int64_t batch) {
  GraphOptions options = devices.graph_options(&rules);
  if (windows) options.memory_order = filters_before_channels;
  Step s{Graph(options), {}};
  trace(s, model, batch, {.attention = attention, .flash_min_seq_length = 0});
  // Compiles quickly: the test compares the partitioning.
  const CompileConfig config{.jax_cache_dir = "", .xla_flags = "--xla_backend_optimization_level=0"};
  const Program program = compile(devices, s.graph, config, "mesh_step");
  MeshRun run;
  if (const auto operations = program.compiled().operations())
    run.collectives = sum_collectives(operations->collectives, devices.mesh());
  ArrayMap state, read_only;
  for (size_t i = 0; i < program.input_names().size(); ++i) {
    const std::string& name = program.input_names()[i];
    const HostArray value = starting(s, name, program.input_shape(i));
    const bool is_read_only = s.graph.output_index(name) < 0;
    Array array = devices.put(value, program.input_sharding(i), name);
    run.bytes[name] = static_cast<int64_t>(value.bytes());
    run.bytes_per_device[name] = array.bytes_per_device();
    (is_read_only ? read_only : state)[name] = std::move(array);
  }
  for (int k = 0; k < steps; ++k) {
    ArrayMap out = program.run(state, read_only);
    run.loss = devices.get(out.at("loss")).to_doubles()[0];
    out.erase("loss");
    state = std::move(out);
  }
  for (const auto& [name, array] : state) {
    run.state[name] = devices.get(array);
    run.bytes_per_device[name] = std::max(run.bytes_per_device[name], array.bytes_per_device());
  }
  return run;
}

}  // namespace md
