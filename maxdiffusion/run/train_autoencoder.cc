#include "maxdiffusion/run/train_autoencoder.h"

#include <algorithm>
#include <utility>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/storage/location.h"

namespace md {
namespace {

/// The means of moments [..., 2C]: the first half of the last axis.
HostArray means(const HostArray& moments) {
  Dims dims = moments.dims();
  const int64_t c = dims.back() /= 2;
  HostArray out(Shape{DType::f32, dims});
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) to[i] = from[i / c * 2 * c + i % c];
  return out;
}

void write_reconstructions(MediaAutoencoder& coder, const Examples& images, const std::string& path) {
  const int64_t most = images.read({0, 0}).at("pixels").dims().size() == 4 ? 4 : 12;
  const int64_t n = std::min(most, images.size()), stride = images.size() / n;
  std::vector<ExampleRef> which;
  for (int64_t i = 0; i < n; ++i) which.push_back({.index = i * stride, .bits = 0});
  const HostArray chosen = batch_of(images, which).at("pixels");
  const HostArray decoded = coder.decode(means(coder.encode(chosen)));
  std::vector<GridCell> cells;
  for (int64_t i = 0; i < n; ++i) cells.push_back({preview_of(without_batch(rows(chosen, i, 1))), ""});
  for (int64_t i = 0; i < n; ++i) cells.push_back({preview_of(image_of_batch(decoded, i)), ""});
  write_png(path, make_grid(cells, n, 2));
}

/// The frames of videos, each as a video with one frame.
class SingleFrames final : public Examples {
 public:
  SingleFrames(std::shared_ptr<const Examples> videos, int64_t frames) : videos_(std::move(videos)), frames_(frames) {}
  int64_t size() const override { return videos_->size() * frames_; }
  HostArrays read(const ExampleRef& which) const override {
    const HostArray video = videos_->read({which.index / frames_, which.bits}).at("pixels"),
                    frame = row_of(video, which.index % frames_);
    return {{"pixels", frame.reshaped(batched(1, frame.shape()).dims)}};
  }

 private:
  std::shared_ptr<const Examples> videos_;
  int64_t frames_;
};

/// Extends an autoencoder that was trained on single frames so that it treats each frame of a video independently:
/// kernels [out, in, frames, h, w] keep only the last frame's part, and temporal kernels pass the last frame through.
void begin_with_single_frames(const ParamTable& params, HostArrays& values) {
  for (const Param& p : params.params()) {
    const Dims& d = p.shape.dims;
    if (d.size() != 5 || d[2] == 1) continue;
    const bool frames_alone = d[3] == 1 && d[4] == 1 && d[0] % d[1] == 0;
    HostArray& kernel = values.at(p.input);
    kernel = copy_of(kernel);  // the values share memory with the device
    auto v = kernel.mutable_view<float>();
    const int64_t of_frame = d[3] * d[4];
    for (int64_t i = 0; i < std::ssize(v); ++i) {
      const bool last = i / of_frame % d[2] == d[2] - 1;
      const int64_t in = i / of_frame / d[2] % d[1], out = i / of_frame / d[2] / d[1];
      if (frames_alone)
        v[static_cast<size_t>(i)] = last && out % d[1] == in ? 1.0f : 0.0f;
      else if (!last)
        v[static_cast<size_t>(i)] = 0;
    }
    const std::string bias = p.input.substr(0, p.input.size() - std::string("weight").size()) + "bias";
    if (const auto found = values.find(bias); frames_alone && found != values.end())
      found->second = zeros_like(found->second);
  }
}

/// Floating-point operations on one device of `steps` steps, in which the tasks take turns.
template <class OneTask>
double device_flops(const Devices& devices, const std::vector<OneTask>& tasks, const StepOptions& step, int64_t steps) {
  double sum = 0;
  for (const OneTask& t : tasks) sum += trace_step(t, devices.graph_options(&devices.rules()), step).flops;
  const auto parts = static_cast<double>(devices.mesh().devices()) * static_cast<double>(tasks.size());
  return sum / parts * static_cast<double>(std::max<int64_t>(steps, 0));
}

StepOptions step_of(const AutoencoderPlan& plan) { return {.scope = plan.scope, .optim = plan.optim}; }

/// Trains on `pixels`, starting from `values` or, if empty, from random values; stores the result in `values`.
void train_stage(ModelComponents& models, const TrainPlan& plan, const AutoencoderTask& task,
                 const std::shared_ptr<const Examples>& pixels, const std::string& stage, int64_t steps,
                 double later_device_flops, HostArrays& values) {
  const std::string component = task.model();
  const int64_t batch = task.batch_size * plan.replicas;
  LoopOptions o = plan.loop;
  o.title = "train " + stage;
  o.folder = below(o.folder, stage);
  o.place = below(o.place, stage);
  o.also_trained.clear();
  if (!o.keys.checkpoint_dir.empty()) o.keys.checkpoint_dir = below(o.keys.checkpoint_dir, stage);
  o.keys.save_final_checkpoint = true;  // the next stage starts from it
  o.later_device_flops = later_device_flops;
  o.step = step_of(*plan.autoencoder);
  o.step.optim.max_train_steps = steps;
  o.step.optim.learning_rate = scaled_rate(o.step.optim, o.step.optim.learning_rate, batch);
  o.initial = [&](const ParamTable& params) {
    return [random = models.open_random(params, component), &values] {
      NamedShards start = random();
      for (auto& [name, shards] : as_shards(values))
        if (const auto found = start.find(name); found != start.end()) found->second = std::move(shards);
      return start;
    };
  };
  o.complete = [&](CheckpointContent& content, const ParamTable&, const NamedShards&) {
    content.files[component + "/config.json"] = models.folder().files().at(component + "/config.json");
  };
  for (auto& [name, value] :
       train_loop(models.devices(), {&task},
                  example_batches(pixels, batch, o.seed, plan.data.shuffle, share_of_update(models.devices(), batch)),
                  o)
           .values)
    values[name] = std::move(value);
}

}  // namespace

void train_autoencoder(ModelComponents& models, const TrainPlan& plan, const std::shared_ptr<const Examples>& images) {
  const AutoencoderTask& task = plan.autoencoder->task;
  const std::string component = task.model();
  const ParamTable whole = models.folder().params({component});
  // A program for one frame has no temporal layers.
  auto complete = [&](HostArrays& values) {
    if (std::ranges::any_of(whole.params(), [&](const Param& p) { return !values.contains(p.input); }))
      values.merge(as_arrays(models.open_random(whole, component)()));
  };
  HostArrays values;
  const double of_denoiser =
      device_flops(models.devices(), plan.tasks, plan.loop.step, plan.loop.step.optim.max_train_steps);
  if (plan.autoencoder->image_steps > 0) {
    AutoencoderTask frames = task;
    frames.batch_size *= std::exchange(frames.size.frames, 1);
    train_stage(models, plan, frames, std::make_shared<SingleFrames>(images, task.size.frames), component + "_images",
                plan.autoencoder->image_steps,
                device_flops(models.devices(), std::vector{task}, step_of(*plan.autoencoder), plan.autoencoder->steps) +
                    of_denoiser,
                values);
    complete(values);
    begin_with_single_frames(whole, values);
  }
  train_stage(models, plan, task, images, component, plan.autoencoder->steps, of_denoiser, values);
  complete(values);
  models.set_autoencoder(std::move(values));
  if (models.devices().replica() > 0) return;
  const std::string path = plan.run.folder + "/samples/reconstructions.png";
  write_reconstructions(models.media_autoencoder(), *images, path);
  log_info("autoencoder: originals above reconstructions in {}", path);
}

}  // namespace md
