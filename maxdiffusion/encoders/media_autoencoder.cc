#include "maxdiffusion/encoders/media_autoencoder.h"

#include <algorithm>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/encoders/tiles.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {

Tensor pixels_to_float(Tensor pixels) { return cast(pixels, DType::f32) / 127.5 - 1.0; }

MediaAutoencoder::MediaAutoencoder(const Devices& devices, std::shared_ptr<const Family> family, HostArrays weights,
                                   int64_t batch, const ScopeOptions& scope, const CompileConfig& compile,
                                   const EncoderKeys& keys)
    : devices_(devices),
      family_(std::move(family)),
      weights_(std::move(weights)),
      batch_(batch),
      scope_(autoencoder_options(scope, keys)),
      compile_(compile) {}

HostArray MediaAutoencoder::run(Direction& direction, const HostArray& input, const char* name, const Build& build) {
  Shape shape = input.shape();
  const int64_t n = shape.dims[0];
  shape.dims[0] = batch_;
  if (!direction.program || direction.input != shape) {
    Graph g(devices_.graph_options(&devices_.rules()));
    ParamTable params;
    const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
    g.output("out", build(models, g.input("in", shape, axis::of_batch(shape.dims.size()))));
    direction = {shape, std::make_unique<Program>(md::compile(devices_, g, compile_, name)), {}};
    place(devices_, *direction.program, of_component(params, family_->autoencoder(), weights_), direction.weights);
  }
  HostArray whole;
  for (int64_t from = 0; from < n; from += batch_) {
    ArrayMap feed;
    place(devices_, *direction.program, HostArrays{{"in", rows(input, from, batch_)}}, feed);
    add_rows(whole, n, from, devices_.get(direction.program->run(feed, direction.weights).at("out")));
  }
  return whole;
}

HostArray MediaAutoencoder::encode(const HostArray& pixels) {
  return run(encoder_, pixels, "media_encoder", [this](const Models& models, Tensor x) {
    const Posterior q = family_->encode_media(models, pixels_to_float(x));
    const Tensor mean = cast(q.mean, DType::f32);
    return concatenate({mean, q.logvar ? exp(cast(q.logvar, DType::f32) * 0.5) : zeros_like(mean)}, -1);
  });
}

HostArray MediaAutoencoder::decode(const HostArray& latents, bool tiled) {
  const int64_t tile = family_->decoder_tile();
  if (tiled && tile > 0 && std::max(latents.dims()[1], latents.dims()[2]) > tile)
    return decode_in_tiles(latents, tile, family_->downscale(), [this](const HostArray& part) { return decode(part); });
  return run(decoder_, latents, "media_decoder",
             [this](const Models& models, Tensor z) { return family_->decode_media(models, z); });
}

}  // namespace md
