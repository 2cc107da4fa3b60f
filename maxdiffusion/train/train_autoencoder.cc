#include "maxdiffusion/train/train_autoencoder.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/image.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/train/encoded.h"

namespace md {

double latent_scale(const HostArray& moments) {
  const int64_t c = moments.dims().back() / 2;
  auto v = moments.view<float>();
  double sum = 0, squares = 0, n = 0;
  for (size_t i = 0; i < v.size(); i += static_cast<size_t>(2 * c))
    for (int64_t k = 0; k < c; ++k) {
      const double mean = v[i + static_cast<size_t>(k)], deviation = v[i + static_cast<size_t>(c + k)];
      sum += mean, squares += mean * mean + deviation * deviation, n += 1;
    }
  return 1 / std::sqrt(std::max(squares / n - (sum / n) * (sum / n), 1e-12));
}

void write_reconstructions(PictureCoder& coder, const HostArray& pixels, const std::string& path) {
  const int64_t n = std::min<int64_t>(12, pixels.dims()[0]), stride = pixels.dims()[0] / n;
  HostArray chosen = rows(pixels, 0, n);
  for (int64_t i = 0; i < n; ++i) set_rows(chosen, i, rows(pixels, i * stride, 1));
  const HostArray decoded = coder.decode(means(coder.encode(chosen)));
  std::vector<GridCell> above, below;
  for (int64_t i = 0; i < n; ++i) {
    above.push_back({without_batch(rows(chosen, i, 1)), ""});
    below.push_back({image_of_batch(decoded, i), ""});
  }
  const int64_t columns = static_cast<int64_t>(above.size());
  above.insert(above.end(), below.begin(), below.end());
  write_png(path, make_grid(above, columns, 2));
}

HostArrays train_autoencoder(const RunConfig& c, const Devices& devices, const ModelFolder& folder,
                             const LoadedImages& pictures) {
  Autoencoder task;
  task.vae = folder.vae;
  task.batch_size =
      global_batch(c.vae.vae_per_device_batch_size, devices.mesh().devices(), "vae_per_device_batch_size");
  task.resolution = c.data.resolution;
  task.kl_weight = c.vae.vae_kl_weight;
  LoopOptions o = loop_options(c, c.folder() + "/vae", "train vae");
  o.step.optim = c.optim.with_switches(true);
  o.step.optim.max_train_steps = c.vae.vae_max_train_steps;
  o.step.optim.learning_rate_schedule_steps = -1;
  o.step.optim.learning_rate = scaled_rate(c.optim, c.vae.vae_learning_rate, task.batch_size);
  LoopCallbacks callbacks;
  callbacks.initial = [&](const ParamTable& p) { return folder.open_values(p, "vae", true, o.seed); };
  callbacks.complete = [&](CheckpointContent& content, const ParamTable&, const HostArrays&) {
    content.files["vae/config.json"] = folder.files.at("vae/config.json");
  };
  return train_loop(devices, {&task},
                    in_memory({{"pixels", pictures.pixels}}, task.batch_size, o.seed, c.data.enable_data_shuffling), o,
                    callbacks)
      .values;
}

}  // namespace md
