#include "maxdiffusion/encoders/image_conditioner.h"

#include <fmt/format.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/media/resize.h"

namespace md {

void check_images(const Family& family, int64_t count) {
  if (const ReferenceImages* references = family.reference_images()) {
    if (count < references->min_images)
      throw Error(Code::invalid_config, "image: empty; this model changes an image").note("try: image=FILE");
    check(count <= references->max_images, Code::invalid_config, "image: {} images are given; this model takes {}{}",
          count, references->max_images > 1 ? "up to " : "", references->max_images);
    return;
  }
  const ImageConditioning* images = family.image_conditioning();
  const int64_t at_least = images ? images->min_images : 0, at_most = images ? images->max_images : 0;
  if (count < at_least)
    throw Error(Code::invalid_config, count == 0 ? "image: empty; this model's videos begin with an image"
                                                 : "last_image: empty; this model's videos end with an image")
        .note(count == 0 ? "try: image=FILE" : "try: last_image=FILE");
  if (count > at_most && at_most == 0)
    throw Error(Code::invalid_config,
                "image, image_url, last_image: given; expected none: this model generates from pure noise")
        .note("try: without image, image_url and last_image");
  if (count > at_most)
    throw Error(Code::invalid_config,
                fmt::format("image, last_image: {} images are given; this model's videos {}", count,
                            at_most == 1 ? "begin with one only" : "begin with one and may end with another"))
        .note(at_most == 1 ? "try: one image, without last_image" : "try: image=FILE last_image=FILE");
}

ImageConditioner::ImageConditioner(const Devices& devices, std::shared_ptr<const Family> family, WeightsOf weights,
                                   MediaAutoencoder& autoencoder, const ScopeOptions& scope,
                                   const CompileConfig& compile, int64_t batch)
    : devices_(devices),
      family_(std::move(family)),
      weights_(std::move(weights)),
      autoencoder_(autoencoder),
      scope_(text_encoder_options(scope, {})),
      compile_(compile),
      batch_(batch) {}

HostArrays ImageConditioner::image_embeddings(const HostArray& prepared) {
  if (!program_) {
    const ImageConditioning& conditioning = *family_->image_conditioning();
    Graph g(devices_.graph_options());
    ParamTable params;
    const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
    for (const auto& [name, tensor] : conditioning.encode(models, g.input("images", prepared.shape())))
      g.output(name, tensor);
    program_.emplace(md::compile(devices_, g, compile_, "image_encoder"));
    place(devices_, *program_, weights_(params, conditioning.encoder), encoder_weights_);
  }
  ArrayMap feed;
  place(devices_, *program_, HostArrays{{"images", prepared}}, feed);
  HostArrays out;
  for (const auto& [name, a] : program_->run(feed, encoder_weights_)) out[name] = devices_.get(a);
  return out;
}

HostArrays ImageConditioner::encode_references(const std::vector<std::vector<HostArray>>& samples) {
  const ReferenceImages& references = *family_->reference_images();
  HostArrays out;
  for (size_t i = 0; i < samples.at(0).size(); ++i) {
    HostArray pixels;
    for (int64_t k = 0; const std::vector<HostArray>& images : samples) {
      const HostArray& image = images.at(i);
      const auto [scaled, cropped] = references.fitted({image.dims()[0], image.dims()[1]});
      const HostArray all = resize_rgb8(image, scaled.height, scaled.width, Filter::lanczos);
      const HostArray middle = crop_rgb8(all, (scaled.height - cropped.height) / 2, (scaled.width - cropped.width) / 2,
                                         cropped.height, cropped.width);
      add_rows(pixels, std::ssize(samples), k++, middle.reshaped({1, cropped.height, cropped.width, 3}));
    }
    out[ReferenceImages::field(i)] = autoencoder_.latents(pixels);
  }
  return out;
}

HostArrays ImageConditioner::encode(const std::vector<std::vector<HostArray>>& samples, const MediaSize& size) {
  const int64_t n = std::ssize(samples.at(0)), all = std::ssize(samples);
  check_images(*family_, n);
  if (n == 0) return {};
  if (family_->reference_images()) return encode_references(samples);
  const ImageConditioning& conditioning = *family_->image_conditioning();
  HostArrays out;
  auto add = [&](int64_t sample, const HostArrays& fields) {
    for (const auto& [name, a] : fields) add_rows(out[name], all, sample, a);
  };
  for (int64_t from = 0; from < all; from += batch_) {
    const int64_t together = std::min(batch_, all - from);
    HostArray videos;  // grey except for the images
    for (int64_t i = 0; i < together; ++i) {
      const std::vector<HostArray>& images = samples[static_cast<size_t>(from + i)];
      if (!conditioning.encoder.empty()) add(from + i, image_embeddings(conditioning.prepare(images)));
      std::vector<HostArray> frames;
      for (const HostArray& image : images)
        frames.push_back(resize_rgb8(image, size.height, size.width, Filter::lanczos));
      add_rows(videos, together, i, conditioning.pixels(frames, size));
    }
    const HostArray moments = autoencoder_.encode(videos);
    for (int64_t i = 0; i < together; ++i) add(from + i, conditioning.from_moments(rows(moments, i, 1), n));
  }
  return out;
}

}  // namespace md
