#include "maxdiffusion/pipelines/image_conditioning.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/images/resize.h"

namespace md {
namespace {

/// What the image encoder makes of prepared images.
HostArrays encoded(const Devices& devices, const Family& family, const WeightsOf& weights, const HostArray& prepared,
                   const ScopeOptions& scope, const CompileConfig& config) {
  Graph g(devices.graph_options());
  ParamTable params;
  const ScopeOptions frozen = text_encoder_options(scope, {});
  const Models models = [&](const std::string& component) { return Scope(g, params, component, frozen); };
  for (const auto& [name, tensor] : family.encode_images(models, g.input("images", prepared.shape())))
    g.output(name, tensor);
  const Program program = compile(devices, g, config, "image_encoder");
  ArrayMap kept, feed;
  place(devices, program, weights(params, family.image_encoder()), kept);
  place(devices, program, HostArrays{{"images", prepared}}, feed);
  HostArrays out;
  for (const auto& [name, a] : program.run(feed, kept)) out[name] = devices.get(a);
  return out;
}

}  // namespace

HostArrays condition_on_images(const Devices& devices, const Family& family, const WeightsOf& weights,
                               MediaAutoencoder& autoencoder, const std::vector<HostArray>& images,
                               const MediaSize& size, const ScopeOptions& scope, const CompileConfig& compile) {
  const Family::ImageCount count = family.images();
  const auto n = static_cast<int64_t>(images.size());
  check(n >= count.least, Code::invalid_config, "this model makes videos of {}; {} given",
        count.least == 2 ? "a first and a last image" : "an image", n == 0 ? "none is" : "one is");
  check(n <= count.most, Code::invalid_config, "this model takes {}, but {} given",
        count.most == 0 ? "no images" : "no last image", n == 1 ? "one is" : "two are");
  if (n == 0) return {};
  HostArrays out;
  if (!family.image_encoder().empty())
    out = encoded(devices, family, weights, family.prepare_images(images), scope, compile);
  std::vector<HostArray> frames;
  for (const HostArray& image : images) frames.push_back(resize_rgb8(image, size.height, size.width, Filter::lanczos));
  out.merge(family.image_conditioning(autoencoder.encode(family.image_pixels(frames, size)), n, size));
  return out;
}

}  // namespace md
