#include "maxdiffusion/tasks/inputs.h"

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/ops/elementwise.h"
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
  std::vector<BatchField> fields(const Family& family, int64_t batch) const override {
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
  std::vector<BatchField> fields(const Family& family, int64_t batch) const override {
    std::vector<BatchField> out;
    for (const Field& f : family.spec().conditioning) {
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

class RandomNoise final : public NoiseInput {
 public:
  RandomNoise(double offset, double perturbation) : offset_(offset), perturbation_(perturbation) {}
  std::vector<BatchField> fields(const NoiseProcess&, const InputSizes&) const override { return {}; }
  RandomInputs read(const NoiseProcess& process, const Shape& latents, const Feed&, Rng rng) const override {
    RandomInputs d;
    d.noise = random_normal(rng.for_("noise"), latents);
    d.t = process.sample_timesteps(rng.for_("timestep"), latents.dims[0]);
    if (offset_ > 0) {
      Dims dims(latents.dims.size(), 1);
      dims.front() = latents.dims.front(), dims.back() = latents.dims.back();
      d.noise = d.noise + random_normal(rng.for_("noise offset"), {DType::f32, dims}) * offset_;
    }
    d.added = d.noise;
    if (perturbation_ > 0) d.added = d.noise + random_normal(rng.for_("perturbation"), latents) * perturbation_;
    return d;
  }

 private:
  double offset_, perturbation_;
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

std::shared_ptr<const MediaInput> pixels_input() { return std::make_shared<Pixels>(); }
std::shared_ptr<const MediaInput> moments_input() { return std::make_shared<Moments>(); }
std::shared_ptr<const MediaInput> latents_input() { return std::make_shared<Latents>(); }
std::shared_ptr<const TextInput> tokens_input() { return std::make_shared<Tokens>(); }
std::shared_ptr<const TextInput> embeddings_input(int64_t length) { return std::make_shared<Embeddings>(length); }
std::shared_ptr<const NoiseInput> random_noise_input(double offset, double perturbation) {
  return std::make_shared<RandomNoise>(offset, perturbation);
}
std::shared_ptr<const NoiseInput> given_timesteps_input() { return std::make_shared<GivenTimesteps>(); }
std::shared_ptr<const NoiseInput> recorded_noise_input() { return std::make_shared<Recorded>(); }

}  // namespace md
