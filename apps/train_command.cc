#include "apps/train_command.h"

#include <fmt/core.h>

#include <cmath>

#include "apps/generate_command.h"
#include "maxdiffusion/base/image.h"
#include "maxdiffusion/pipelines/text_to_image.h"
#include "maxdiffusion/train/train.h"

namespace md {
namespace {

std::string draw(const TrainedModel& m) {
  RunConfig config = m.config;
  const SampleKeys& keys = config.sample;
  if (keys.prompt.empty()) return "";
  if (!keys.num_images_per_prompt) config.sample.num_images_per_prompt = 1;
  TextToImageOptions o = text_to_image_options(config, m.folder, m.devices.mesh().devices());
  o.batch = 0;  // sizes of training are small
  const HostArray latents = denoise(m.devices, m.folder, m.weights, encode_prompts(m.text_encoder, m.folder, o), o);
  const HostArray pictures = decode_latents(m.coder, m.folder, latents, keys.vae_tiling);
  std::vector<GridCell> cells;
  const int64_t n = pictures.dims()[0];
  for (int64_t i = 0; i < n; ++i)
    cells.push_back({image_of_batch(pictures, i), o.prompts[static_cast<size_t>(i / o.images_per_prompt)]});
  const std::string path = fmt::format("{}/step_{:06}.png", m.samples, m.step);
  const auto columns = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
  write_png(path, make_grid(cells, columns, std::max<int64_t>(1, 128 / m.config.data.resolution)));
  return path;
}

}  // namespace

void train_command(const std::string& config, const std::vector<std::string>& overrides) {
  const RunConfig c = RunConfig::load(config, overrides);
  if (!c.dreambooth.instance_data_dir.empty()) draw_class_pictures(c);
  train(c, draw);
}

}  // namespace md
