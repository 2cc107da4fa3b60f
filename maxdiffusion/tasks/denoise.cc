#include "maxdiffusion/tasks/denoise.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {

Tensor Distance::of(Tensor e, Tensor t, const NoiseProcess& process) const {
  if (type == "l2") return square(e);
  if (type == "l1") return abs(e);
  check(type == "huber" || type == "smooth_l1", Code::invalid_config,
        "loss_type is '{}'; expected one of: l2, l1, huber, smooth_l1", type);
  Tensor threshold = cast(t, DType::f32) * 0.0;
  if (schedule == "constant") {
    threshold = threshold + c * scale;
  } else if (schedule == "exponential") {
    const double rate = std::log(c) / static_cast<double>(process.num_train_timesteps());
    threshold = exp(cast(t, DType::f32) * rate) * scale;
  } else {
    check(schedule == "snr", Code::invalid_config,
          "huber_schedule is '{}'; expected one of: constant, exponential, snr", schedule);
    threshold = square(process.signal_share(t)) * (1 - c) + c;
  }
  Dims dims(static_cast<size_t>(e.rank()), 1);
  dims[0] = t.dim(0);
  threshold = reshape(threshold, dims);
  // √(e² + c²) − c without the difference of nearly equal numbers.
  const Tensor y = square(e) * 2.0 / (sqrt(square(e) + square(threshold)) + threshold);
  return type == "huber" ? y * threshold : y;
}

std::shared_ptr<const NoiseProcess> DenoiseTask::process_of_size() const {
  const std::shared_ptr<const NoiseProcess> sized = process->for_tokens(family->tokens(size));
  return sized ? sized : process;
}

bool DenoiseTask::accepts(const NamedShards& batch) const {
  if (!noise->recorded()) return true;
  const std::vector<double> times = batch.at(kTimesteps).whole().to_doubles();
  const int64_t trained = std::ranges::count_if(times, [this](double t) { return process->contains(t); });
  check(trained == 0 || trained == std::ssize(times), Code::invalid_config,
        "replay_batches: {} of the {} timesteps of a batch are those of {}; expected all or none: an update trains one "
        "of two experts",
        trained, times.size(), model());
  return trained > 0;
}

std::vector<BatchField> DenoiseTask::batch() const {
  const InputSizes s{batch_size, family->latent_dims(size)};
  const std::vector<MediaSize> reference_sizes(static_cast<size_t>(references), size);
  std::vector<BatchField> f = text->fields(*family, batch_size, reference_sizes);
  const size_t texts = f.size();
  auto add = [&f](const std::vector<BatchField>& fields) { f.insert(f.end(), fields.begin(), fields.end()); };
  add(media->fields(*family->spec().autoencoder, s));
  add(noise->fields(*process, s));
  if (masked) {
    Dims dims = s.latent;
    dims.back() = 1;
    add({batch_field(batch_size, {"mask", {DType::f32, dims}})});
  }
  if (sizes)
    for (const Field& field : family->spec().size_conditioning) add({batch_field(batch_size, field)});
  if (images)
    for (const Field& field : family->image_conditioning()->fields(size)) add({batch_field(batch_size, field)});
  for (size_t i = 0; i < reference_sizes.size(); ++i)
    add({batch_field(batch_size, {ReferenceImages::field(i), {DType::f32, s.latent}})});
  if (prior_loss_weight)
    for (size_t i = 0, n = f.size(); i < n; ++i) f.push_back({"class_" + f[i].name, f[i].shape});
  if (caption_dropout > 0)
    for (size_t i = 0; i < texts; ++i) {
      Shape one = f[i].shape;
      one.dims.erase(one.dims.begin());
      f.push_back({"empty_" + f[i].name, one, false});
    }
  return f;
}

Tensor DenoiseTask::loss(const Models& models, const Feed& feed, Rng rng) const {
  const Tensor per_sample = sample_losses(models, feed, rng);
  if (!prior_loss_weight) return mean(per_sample);
  const std::vector<Tensor> halves = split(per_sample, 2, 0);
  return mean(halves[0]) + mean(halves[1]) * *prior_loss_weight;
}

Tensor DenoiseTask::batch_rows(Tensor replica, int64_t replicas) const {
  const Tensor rows = Task::batch_rows(replica, replicas);
  if (!prior_loss_weight) return rows;
  return concatenate({rows, rows + static_cast<double>(batch_size * replicas)},
                     0);  // the class's samples have numbers after all others
}

Tensor DenoiseTask::sample_losses(const Models& models, const Feed& feed, Rng rng) const {
  const int64_t b = prior_loss_weight ? 2 * batch_size : batch_size;
  Feed all = feed;  // the subject's samples, then those of the class
  if (prior_loss_weight)
    for (const auto& [name, x] : feed)
      if (const auto other = feed.find("class_" + name); other != feed.end())
        all[name] = concatenate({x, other->second}, 0);

  const Tensor x0 = media->read(*family->spec().autoencoder, models, all, rng);
  const std::shared_ptr<const NoiseProcess> sized = process_of_size();
  const NoiseInput::RandomInputs random = noise->read(*sized, x0.shape(), all, rng);

  if (caption_dropout > 0 && !noise->recorded()) {
    const Tensor drop = lt(random_uniform(rng.for_("caption"), {DType::f32, {b}}),
                           full(x0.graph(), caption_dropout, {DType::f32, {b}}));
    for (const BatchField& f :
         text->fields(*family, b, std::vector<MediaSize>(static_cast<size_t>(references), size))) {
      Dims dims(f.shape.dims.size(), 1);
      dims[0] = b;
      all[f.name] = where(reshape(drop, dims), expand_dims(feed.at("empty_" + f.name), 0), all.at(f.name));
    }
  }
  Conditioning conditioning = text->read(*family, models, all);
  if (sizes)
    for (const Field& field : family->spec().size_conditioning) conditioning[field.name] = all.at(field.name);
  const MediaSize s = conditioning_size.value_or(size);
  const std::array<int64_t, 2> whole = {s.height, s.width};
  conditioning.merge(
      family->extra_conditioning(x0.graph(), b, {{whole, {0, 0}, whole}, constant(x0.graph(), guidance, DType::f32)}));
  if (images)
    for (const Field& field : family->image_conditioning()->fields(size)) conditioning[field.name] = all.at(field.name);
  for (int64_t i = 0; i < references; ++i) {
    const std::string name = ReferenceImages::field(static_cast<size_t>(i));
    conditioning[name] = all.at(name);
  }
  const Tensor noisy = sized->add_noise(x0, random.added, random.t);
  const Models with_expert = [&](const std::string& component) {
    return models(component == family->spec().denoiser() ? model() : component);
  };
  const Tensor prediction = family->predict(with_expert, noisy, sized->model_timestep(random.t), conditioning, {});
  Tensor error = distance.of(sized->target(x0, random.noise, random.t) - prediction, random.t, *sized);
  if (contrast > 0) {
    const int64_t n = x0.dim(0);
    check(n > 1, Code::invalid_config,
          "contrastive_flow_matching is true, but a batch has 1 sample; expected 2 or more (per_device_batch_size, "
          "gradient_accumulation_steps)");
    const auto before = [n](Tensor x) {
      return concatenate({slice_axis(x, 0, n - 1, n), slice_axis(x, 0, 0, n - 1)}, 0);
    };
    const Tensor other = sized->target(before(x0), before(random.noise), random.t);
    error = error - square(other - prediction) * contrast;
  }
  if (masked) error = error * all.at("mask");
  Axes axes;
  for (int64_t i = 1; i < error.rank(); ++i) axes.push_back(i);
  const Tensor per_sample = mean(error, axes), weight = sized->weight(random.t);
  return weight ? per_sample * weight : per_sample;
}

std::optional<TimedLosses> DenoiseTask::timed_losses(const HostArrays& samples) const {
  if (noise->recorded()) return {};
  DenoiseTask plain = *this;
  plain.media = samples.contains("latents") ? latents_input() : moments_input();
  plain.noise = given_timesteps_input();
  plain.masked = plain.sizes = false;
  plain.caption_dropout = 0;
  plain.prior_loss_weight.reset();
  plain.distance = {};
  plain.contrast = 0;
  plain.process = process->unweighted();
  return TimedLosses{
      plain.batch(), process->num_train_timesteps(),
      [p = process](int64_t t) { return p->contains(static_cast<double>(t)); },
      [plain](const Models& models, const Feed& feed, Rng rng) { return plain.sample_losses(models, feed, rng); }};
}

}  // namespace md
