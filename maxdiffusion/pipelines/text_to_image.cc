#include "maxdiffusion/pipelines/text_to_image.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/tasks/latent_diffusion.h"

namespace md {
namespace {

/// Each row `times` times, in place of it.
HostArray repeat_rows(const HostArray& a, int64_t times) {
  Dims dims = a.dims();
  const int64_t n = dims[0];
  dims[0] = n * times;
  HostArray out(Shape{a.dtype(), dims});
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < times; ++k) set_rows(out, i * times + k, rows(a, i, 1));
  return out;
}

/// One denoising loop over `batch` pictures. Inputs: prompt_embeds [B, L, D], text_embeds [B, P], with guidance the
/// same with the prefix negative_, and key u32 [2]; output latents [B, h, w, C], still scaled.
void build_loop(Graph& g, const Scope& s, const ModelFolder& m, const Scheduler& scheduler, const SampleTable& table,
                int64_t batch, const Shape& embeds, const Shape& pooled, const TextToImageOptions& o) {
  const bool guided = o.guidance_scale > 1, micro = m.unet.addition_embed_type.has_value();
  auto conditioning = [&](const std::string& name, Shape shape) {
    shape.dims[0] = batch;
    LogicalAxes axes(shape.dims.size());
    axes[0] = axis::kData;
    Tensor x = g.input(name, shape, axes);
    return guided ? concatenate({g.input("negative_" + name, shape, axes), x}, 0) : x;
  };
  Tensor prompt = conditioning("prompt_embeds", embeds), text;
  if (micro) text = conditioning("text_embeds", pooled);
  Rng rng(g.input("key", {DType::u32, {2}}));

  const int64_t calls = guided ? 2 * batch : batch, down = m.vae.downscale();
  const Shape latent{DType::f32, {batch, o.height / down, o.width / down, m.unet.in_channels}};
  Tensor rows = constant(g, table.rows);
  HostArray times(Shape{DType::f32, {table.rows.dims()[0]}});
  for (size_t i = 0; i < table.timesteps.size(); ++i)
    times.mutable_view<float>()[i] = static_cast<float>(table.timesteps[i]);
  Tensor timesteps = constant(g, times);

  std::vector<Tensor> carry = {random_normal(rng.for_("latents"), latent) * table.init_noise_sigma};
  for (int64_t i = 0; i < scheduler.history(); ++i) carry.push_back(zeros_like(carry[0]));
  ScanResult out = scan(table.rows.dims()[0], carry, [&](ScanStep& step, const std::vector<Tensor>& c) -> ScanResult {
    Tensor row = step.slice(rows), x = scheduler.scale_input(c[0], row);
    UNetInputs in{.sample = guided ? concatenate({x, x}, 0) : x,
                  .timestep = broadcast_to(reshape(step.slice(timesteps), {1}), {calls}),
                  .encoder_hidden_states = prompt};
    if (micro) {
      in.text_embeds = text;
      const double h = static_cast<double>(o.height), w = static_cast<double>(o.width);
      in.time_ids = micro_conditioning(step.body(), calls, h, w, 0, 0, h, w);
    }
    Tensor prediction = unet2d(s.in_graph(step.body()), m.unet, in);
    if (guided) {
      std::vector<Tensor> halves = split(prediction, 2, 0);
      prediction = halves[0] + (halves[1] - halves[0]) * o.guidance_scale;
    }
    return {scheduler.step(prediction, c[0], row, {c.begin() + 1, c.end()}, rng.at(step.index()).for_("step")), {}};
  });
  g.output("latents", out.carry[0]);
}

}  // namespace

HostArray text_to_image(const Devices& devices, const ModelFolder& m, const std::map<std::string, HostArray>& unet,
                        TextEncoder& text, PictureCoder& coder, const std::vector<std::string>& prompts,
                        const TextToImageOptions& o) {
  check(!prompts.empty(), Code::invalid_config, "prompt is empty; give prompt=\"…\"");
  const int64_t down = m.vae.downscale();
  check(o.height > 0 && o.width > 0 && o.height % down == 0 && o.width % down == 0, Code::invalid_config,
        "size {}x{} is not a multiple of {}, the autoencoder's downscale", o.height, o.width, down);
  std::unique_ptr<Scheduler> scheduler = make_scheduler(nlohmann::json::parse(o.scheduler_config));
  const SampleTable table = scheduler->table(o.num_inference_steps);

  const bool guided = o.guidance_scale > 1;
  const int64_t batch = static_cast<int64_t>(prompts.size()) * o.num_images_per_prompt;
  TextEmbeddings embeds = text.encode(prompts);
  std::map<std::string, HostArray> values = unet;
  auto add = [&](const std::string& name, const HostArray& a, int64_t times) {
    if (a) values[name] = repeat_rows(a, times);
  };
  add("prompt_embeds", embeds.prompt_embeds, o.num_images_per_prompt);
  add("text_embeds", embeds.text_embeds, o.num_images_per_prompt);
  if (guided) {
    TextEmbeddings negative = text.encode({o.negative_prompt});
    add("negative_prompt_embeds", negative.prompt_embeds, batch);
    add("negative_text_embeds", negative.text_embeds, batch);
  }
  const uint32_t key[2] = {static_cast<uint32_t>(o.seed), static_cast<uint32_t>(o.seed >> 32)};
  values["key"] = HostArray::of<uint32_t>({DType::u32, {2}}, key);

  AxisRules rules = AxisRules::unet();
  Graph g(devices.graph_options(&rules));
  ParamTable params;
  Scope scope(g, params, "unet", o.scope);
  build_loop(g, scope.frozen(), m, *scheduler, table, batch, embeds.prompt_embeds.shape(),
             embeds.text_embeds ? embeds.text_embeds.shape() : Shape{}, o);
  Program program = compile(devices, g, o.compile, "text_to_image");
  ArrayMap arrays;
  place(devices, program, values, arrays);
  HostArray latents = devices.get(program.run(arrays).at("latents"));

  HostArray unscaled(latents.shape());
  auto from = latents.view<float>();
  auto to = unscaled.mutable_view<float>();
  for (size_t i = 0; i < from.size(); ++i)
    to[i] = static_cast<float>(from[i] / m.vae.scaling_factor + m.vae.shift_factor);
  return coder.decode(unscaled);
}

}  // namespace md
