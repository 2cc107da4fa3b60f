#include "apps/train_command.h"

#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/picture.h"
#include "maxdiffusion/pipelines/text_to_image.h"
#include "maxdiffusion/train/train.h"

namespace md {
namespace {

std::string draw(const TrainedModel& m) {
  const SampleKeys& keys = m.config.sample;
  if (keys.prompt.empty()) return "";
  nlohmann::json scheduler = nlohmann::json::parse(m.folder.scheduler_config());
  for (const auto& [name, text] : keys.diffusion_scheduler_config) scheduler[name] = nlohmann::json::parse(text);
  TextToImageOptions o{.negative_prompt = keys.negative_prompt,
                       .guidance_scale = keys.guidance_scale,
                       .num_inference_steps = keys.num_inference_steps,
                       .num_images_per_prompt = keys.num_images_per_prompt,
                       .height = m.config.data.resolution,
                       .width = m.config.data.resolution,
                       .seed = static_cast<uint64_t>(keys.sample_seed),
                       .scheduler_config = scheduler.dump(),
                       .scope = m.scope,
                       .compile = m.config.compile};
  HostArray pictures = text_to_image(m.devices, m.folder, m.unet, m.text_encoder, m.coder, keys.prompt, o);
  std::vector<GridCell> cells;
  const int64_t n = pictures.dims()[0];
  for (int64_t i = 0; i < n; ++i) {
    HostArray one = rows(pictures, i, 1);
    cells.push_back({to_rgb8(one.reshaped({one.dims().begin() + 1, one.dims().end()})),
                     keys.prompt[static_cast<size_t>(i / keys.num_images_per_prompt)]});
  }
  const std::string path = fmt::format("{}/step_{:06}.png", m.samples, m.step);
  const auto columns = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
  write_png(path, make_grid(cells, columns, std::max<int64_t>(1, 128 / m.config.data.resolution)));
  return path;
}

}  // namespace

void train_command(const std::string& config, const std::vector<std::string>& overrides) {
  train(RunConfig::load(config, overrides), draw);
}

}  // namespace md
