#include "maxdiffusion/run/train_autoencoder.h"

#include <algorithm>
#include <cstdlib>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/image.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/run/plan.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/tasks/autoencoder.h"

namespace md {
namespace {

/// Of moments [..., 2C] the means, the first half of the last axis.
HostArray means(const HostArray& moments) {
  Dims dims = moments.dims();
  const int64_t c = dims.back() /= 2;
  HostArray out(Shape{DType::f32, dims});
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) to[i] = from[i / c * 2 * c + i % c];
  return out;
}

void write_reconstructions(MediaAutoencoder& coder, const HostArray& pixels, const std::string& path) {
  const int64_t most = pixels.dims().size() == 5 ? 4 : 12;
  const int64_t n = std::min(most, pixels.dims()[0]), stride = pixels.dims()[0] / n;
  HostArray chosen = rows(pixels, 0, n);
  for (int64_t i = 0; i < n; ++i) set_rows(chosen, i, rows(pixels, i * stride, 1));
  const HostArray decoded = coder.decode(means(coder.encode(chosen)));
  std::vector<GridCell> cells;
  for (int64_t i = 0; i < n; ++i) cells.push_back({still_of(without_batch(rows(chosen, i, 1))), ""});
  for (int64_t i = 0; i < n; ++i) cells.push_back({still_of(image_of_batch(decoded, i)), ""});
  write_png(path, make_grid(cells, n, 2));
}

}  // namespace

LoopOptions loop_options(const RunConfig& c, const std::string& folder, const std::string& title) {
  LoopOptions o;
  o.title = title;
  o.folder = folder;
  o.step.optim = c.optim;
  o.step.scope = scope_options(c.layers);
  o.seed = c.seed();
  o.keys = c.loop;
  o.metrics = c.metrics;
  o.profile = c.profile;
  o.compile = c.compile;
  o.run_name = c.run.run_name;
  const char* libtpu = std::getenv("LIBTPU_INIT_ARGS");  // read by the plugin itself
  o.texts = {{"config", "```yaml\n" + c.to_yaml() + "```"}, {"libtpu_init_args", libtpu ? libtpu : ""}};
  return o;
}

void train_autoencoder(RunModels& models, const LoadedImages& images) {
  const RunConfig& c = models.config();
  AutoencoderTask task;
  task.family = models.family();
  task.batch_size =
      global_batch(c.vae.vae_per_device_batch_size, models.devices().mesh().devices(), "vae_per_device_batch_size");
  task.size = training_size(c, *task.family);
  task.kl_weight = c.vae.vae_kl_weight;
  const std::string component = task.model();
  LoopOptions o = loop_options(c, c.folder() + "/" + component, "train " + component);
  o.keys.save_final_checkpoint = true;  // the next stage's start
  if (!o.keys.checkpoint_dir.empty()) o.keys.checkpoint_dir += "/" + component;
  o.step.optim = c.optim.with_switches(true);
  o.step.optim.max_train_steps = c.vae.vae_max_train_steps;
  o.step.optim.learning_rate_schedule_steps = -1;
  o.step.optim.learning_rate = scaled_rate(c.optim, c.vae.vae_learning_rate, task.batch_size);
  o.initial = [&](const ParamTable& params) { return models.open_random(params, component); };
  o.complete = [&](CheckpointContent& content, const ParamTable&, const NamedPieces&) {
    content.files[component + "/config.json"] = models.folder().files().at(component + "/config.json");
  };
  models.set_autoencoder(
      train_loop(models.devices(), {&task},
                 in_memory({{"pixels", images.pixels}}, task.batch_size, o.seed, c.batches.enable_data_shuffling,
                           share_of_batch(models.devices(), task.batch_size)),
                 o)
          .values);
  const std::string path = c.folder() + "/samples/reconstructions.png";
  write_reconstructions(models.media_autoencoder(), images.pixels, path);
  log_info("autoencoder: originals above reconstructions in {}", path);
}

}  // namespace md
