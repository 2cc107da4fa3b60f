#include "maxdiffusion/tasks/inputs.h"

#include <cmath>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {

BatchField batch_field(int64_t b, const Field& field) { return {field.name, batched(b, field.shape)}; }

namespace {

Shape latent_shape(const InputSizes& s, int64_t channels_times = 1) {
  Dims dims = s.latent;
  dims.back() *= channels_times;
  return batched(s.batch, {DType::f32, dims});
}

Tensor sampled(Tensor mean, Tensor deviation, Rng rng) {
  return deviation ? mean + deviation * random_normal(rng.for_("posterior"), mean.shape()) : mean;
}

class Pixels final : public MediaInput {
 public:
  std::vector<BatchField> fields(const Autoencoder& a, const InputSizes& s) const override {
    return {batch_field(s.batch, {"pixels", {DType::u8, a.pixel_dims(a.media_size(s.latent))}})};
  }
  Tensor read(const Autoencoder& a, const Models& models, const Feed& feed, Rng rng) const override {
    const Posterior q = a.encode(models, pixels_to_float(feed.at("pixels")), nullptr);
    const LatentScale& scale = a.latent_scale;
    const Tensor mean = cast(q.mean, DType::f32), logvar = q.logvar ? cast(q.logvar, DType::f32) : Tensor();
    return sampled(scale.apply(mean), logvar ? scale.apply_to_deviation(exp(logvar * 0.5)) : Tensor(), rng);
  }
};

class Moments final : public MediaInput {
 public:
  std::vector<BatchField> fields(const Autoencoder&, const InputSizes& s) const override {
    return {{"moments", latent_shape(s, 2)}};
  }
  Tensor read(const Autoencoder&, const Models&, const Feed& feed, Rng rng) const override {
    const std::vector<Tensor> halves = split(feed.at("moments"), 2, -1);
    return sampled(halves[0], halves[1], rng);
  }
};

class Latents final : public MediaInput {
 public:
  std::vector<BatchField> fields(const Autoencoder&, const InputSizes& s) const override {
    return {{"latents", latent_shape(s)}};
  }
  Tensor read(const Autoencoder&, const Models&, const Feed& feed, Rng) const override { return feed.at("latents"); }
};

class Tokens final : public TextInput {
 public:
  std::vector<BatchField> fields(const Family& family, int64_t batch, const std::vector<MediaSize>&) const override {
    std::vector<BatchField> out;
    for (const Field& f : family.spec().text_fields()) out.push_back(batch_field(batch, f));
    return out;
  }
  Conditioning read(const Family& family, const Models& models, const Feed& feed) const override {
    Conditioning text;
    for (const Field& f : family.spec().text_fields()) text[f.name] = feed.at(f.name);
    return family.encode_text(models, text, 0);
  }
  bool tokens() const override { return true; }
};

class Embeddings final : public TextInput {
 public:
  explicit Embeddings(int64_t length) : length_(length) {}
  std::vector<BatchField> fields(const Family& family, int64_t batch,
                                 const std::vector<MediaSize>& references) const override {
    std::vector<BatchField> out;
    for (const Field& f : family.caption_fields(references)) {
      out.push_back(batch_field(batch, f));
      if (length_ > 0 && f.shape.rank() == 2) out.back().shape.dims[1] = length_;
    }
    return out;
  }
  Conditioning read(const Family& family, const Models&, const Feed& feed) const override {
    Conditioning c;
    for (const Field& f : family.spec().conditioning) c[f.name] = feed.at(f.name);
    return c;
  }

 private:
  int64_t length_;
};

/// Bilinear weights that enlarge the first `part` of `whole` numbers to all of them, [B, whole, whole]; part: [B, 1,
/// 1].
Tensor enlarging(Tensor part, int64_t whole) {
  const int64_t b = part.dim(0);
  const Tensor to = iota(part.graph(), {DType::f32, {1, whole, 1}}, 1),
               from = iota(part.graph(), {DType::f32, {1, 1, whole}}, 2);
  const auto all = [&](Tensor x) { return broadcast_to(x, {b, whole, whole}); };
  const Tensor at = maximum(all(to + 0.5) * all(part) / static_cast<double>(whole) - 0.5,
                            full(part.graph(), 0, {DType::f32, {b, whole, whole}}));
  return relu(1.0 - abs(minimum(at, all(part - 1.0)) - all(from)));
}

class RandomNoise final : public NoiseInput {
 public:
  explicit RandomNoise(const RandomNoiseOptions& options) : o_(options) {}
  std::vector<BatchField> fields(const NoiseProcess&, const InputSizes&) const override { return {}; }
  RandomInputs read(const NoiseProcess& process, const Shape& latents, const Feed&, Rng rng) const override {
    RandomInputs d;
    d.noise = random_normal(rng.for_("noise"), latents);
    d.t = process.sample_timesteps(rng.for_("timestep"), latents.dims[0]);
    if (o_.offset > 0) {
      Dims dims(latents.dims.size(), 1);
      dims.front() = latents.dims.front(), dims.back() = latents.dims.back();
      d.noise = d.noise + random_normal(rng.for_("noise offset"), {DType::f32, dims}) * o_.offset;
    }
    if (o_.multires.iterations > 0) d.noise = o_.multires.of(d.noise, rng.for_("multires"));
    d.added = d.noise;
    if (o_.perturbation > 0) d.added = d.noise + random_normal(rng.for_("perturbation"), latents) * o_.perturbation;
    return d;
  }

 private:
  RandomNoiseOptions o_;
};

class GivenTimesteps final : public NoiseInput {
 public:
  std::vector<BatchField> fields(const NoiseProcess& process, const InputSizes& s) const override {
    return {{kTimesteps, {process.timestep_dtype(), {s.batch}}}};
  }
  RandomInputs read(const NoiseProcess&, const Shape& latents, const Feed& feed, Rng rng) const override {
    const Tensor noise = random_normal(rng.for_("noise"), latents);
    return {noise, feed.at(kTimesteps), noise};
  }
};

class Recorded final : public NoiseInput {
 public:
  std::vector<BatchField> fields(const NoiseProcess& process, const InputSizes& s) const override {
    return {{"noise", latent_shape(s)}, {kTimesteps, {process.timestep_dtype(), {s.batch}}}};
  }
  RandomInputs read(const NoiseProcess&, const Shape&, const Feed& feed, Rng) const override {
    return {feed.at("noise"), feed.at(kTimesteps), feed.at("noise")};
  }
  bool recorded() const override { return true; }
};

}  // namespace

Tensor MultiresNoise::of(Tensor noise, Rng rng) const {
  const int64_t rank = noise.rank(), b = noise.dim(0), h = noise.dim(rank - 3), w = noise.dim(rank - 2);
  const Shape one{DType::f32, {b, 1, 1}};
  Tensor goes_on = full(noise.graph(), 1, one), sum = noise;
  for (int64_t i = 0; i < iterations; ++i) {
    Tensor coarse = random_normal(rng.for_("noise").fold(static_cast<uint32_t>(i)), noise.shape());
    if (i > 0) {
      const Tensor r = random_uniform(rng.for_("ratio").fold(static_cast<uint32_t>(i)), one, 2, 4);
      Tensor power = r;
      for (int64_t k = 1; k < i; ++k) power = power * r;
      const auto side = [&](int64_t whole) {
        return maximum(floor(static_cast<double>(whole) / power), full(noise.graph(), 1, one));
      };
      const Tensor rows = side(h), columns = side(w);
      // [B, H, H']·[B, …, H', W', C] → [B, H, …, W', C]; [B, W, W']·that → [B, W, H, …, C].
      coarse = dot(enlarging(rows, h), coarse, {{2}, {rank - 3}, {0}, {0}, Precision::highest});
      coarse = dot(enlarging(columns, w), coarse, {{2}, {rank - 2}, {0}, {0}, Precision::highest});
      Axes back = {0};
      for (int64_t k = 3; k < rank - 1; ++k) back.push_back(k);
      for (const int64_t axis : {int64_t{2}, int64_t{1}, rank - 1}) back.push_back(axis);
      Dims dims(static_cast<size_t>(rank), 1);
      dims[0] = b;
      coarse = transpose(coarse, back) * reshape(goes_on, dims);
      goes_on = goes_on * cast(gt(minimum(rows, columns), full(noise.graph(), 1, one)), DType::f32);
    }
    sum = sum + coarse * std::pow(discount, static_cast<double>(i));
    if (h == 1 || w == 1) break;
  }
  Axes axes;
  for (int64_t i = 1; i < rank; ++i) axes.push_back(i);
  const double n = static_cast<double>(noise.shape().elements()) / static_cast<double>(b);
  const Tensor variance = md::sum(square(sum - mean(sum, axes, true)), axes, true) / std::max(n - 1, 1.0);
  return sum * rsqrt(variance);
}

std::shared_ptr<const MediaInput> pixels_input() { return std::make_shared<Pixels>(); }
std::shared_ptr<const MediaInput> moments_input() { return std::make_shared<Moments>(); }
std::shared_ptr<const MediaInput> latents_input() { return std::make_shared<Latents>(); }
std::shared_ptr<const TextInput> tokens_input() { return std::make_shared<Tokens>(); }
std::shared_ptr<const TextInput> embeddings_input(int64_t length) { return std::make_shared<Embeddings>(length); }
std::shared_ptr<const NoiseInput> random_noise_input(const RandomNoiseOptions& options) {
  return std::make_shared<RandomNoise>(options);
}
std::shared_ptr<const NoiseInput> given_timesteps_input() { return std::make_shared<GivenTimesteps>(); }
std::shared_ptr<const NoiseInput> recorded_noise_input() { return std::make_shared<Recorded>(); }

}  // namespace md
