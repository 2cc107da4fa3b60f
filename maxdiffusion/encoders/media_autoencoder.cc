#include "maxdiffusion/encoders/media_autoencoder.h"

#include <fmt/format.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/encoders/tiles.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {

Tensor pixels_to_float(Tensor pixels) { return cast(pixels, DType::f32) / 127.5 - 1.0; }

MediaChunks MediaChunkKeys::chunks(const Family& family) const {
  const int64_t scale = std::max<int64_t>(family.frame_scale(), 1);
  check(vae_encode_chunk == -1 || vae_encode_chunk > 0, Code::invalid_config,
        "vae_encode_chunk is {}; expected -1 or at least 1", vae_encode_chunk);
  check(vae_decode_chunk == -1 || vae_decode_chunk > 0, Code::invalid_config,
        "vae_decode_chunk is {}; expected -1 or at least 1", vae_decode_chunk);
  return {vae_encode_chunk < 0 ? -1 : std::max<int64_t>(vae_encode_chunk / scale, 1), vae_decode_chunk};
}

MediaAutoencoder::MediaAutoencoder(const Devices& devices, std::shared_ptr<const Family> family, HostArrays weights,
                                   int64_t batch, const ScopeOptions& scope, const CompileConfig& compile,
                                   const EncoderKeys& keys, MediaChunks chunks)
    : devices_(devices),
      family_(std::move(family)),
      weights_(std::move(weights)),
      batch_(batch),
      scope_(autoencoder_options(scope, keys)),
      compile_(compile),
      chunks_(chunks) {
  const bool videos = family_->frame_scale() > 0;
  encoder_ = {.name = "media_encoder",
              .build = [f = family_, videos](const Models& models, Tensor pixels, MediaState& state) {
                const Tensor x = pixels.dtype() == DType::u8 ? pixels_to_float(pixels) : pixels;
                const Posterior q = videos ? f->encode_chunk(models, x, state) : f->encode_media(models, x);
                const Tensor mean = cast(q.mean, DType::f32);
                return concatenate({mean, q.logvar ? exp(cast(q.logvar, DType::f32) * 0.5) : zeros_like(mean)}, -1);
              }};
  decoder_ = {.name = "media_decoder",
              .build = [f = family_, videos](const Models& models, Tensor latents, MediaState& state) {
                return videos ? f->decode_chunk(models, latents, state) : f->decode_media(models, latents);
              }};
}

HostArray MediaAutoencoder::run(const Direction& direction, Stage& stage, const HostArray& input, ArrayMap* state) {
  auto name_of = [](size_t i) { return fmt::format("state.{}", i); };
  auto found = stage.find({input.dtype(), input.dims()});
  if (found == stage.end()) {
    Graph g(devices_.graph_options(&devices_.rules()));
    ParamTable params;
    const LogicalAxes axes = axis::of_batch(input.dims().size());
    const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
    MediaState memory;
    for (size_t i = 0; state && state->contains(name_of(i)); ++i)
      memory.push_back(g.input(name_of(i), state->at(name_of(i)).shape(), axes));
    const bool goes_on = !memory.empty();
    g.output("out", direction.build(models, g.input("in", input.shape(), axes), memory));
    for (size_t i = 0; state && i < memory.size(); ++i) {
      g.output(name_of(i), memory[i], goes_on ? name_of(i) : "in");
      if (goes_on) g.alias(name_of(i), name_of(i));
    }
    found =
        stage.emplace(std::pair{input.dtype(), input.dims()}, md::compile(devices_, g, compile_, direction.name)).first;
    HostArrays missing;
    for (const auto& [name, a] : of_component(params, family_->autoencoder(), weights_))
      if (!placed_.contains(name)) missing[name] = a;
    place(devices_, found->second, missing, placed_);
  }
  ArrayMap feed;
  if (state) feed = std::move(*state);
  place(devices_, found->second, HostArrays{{"in", input}}, feed);
  ArrayMap results = found->second.run(feed, placed_);
  HostArray out = devices_.get(results.at("out"));
  results.erase("out");
  if (state) *state = std::move(results);
  return out;
}

HostArray MediaAutoencoder::run(Direction& direction, const HostArray& input, const Done& done) {
  HostArray whole;
  for (int64_t n = input.dims()[0], from = 0; from < n; from += batch_) {
    add_rows(whole, n, from, run(direction, direction.whole, rows(input, from, batch_), nullptr));
    if (done) done(std::min(batch_, n - from));
  }
  return whole;
}

HostArray MediaAutoencoder::run_chunks(Direction& direction, const HostArray& input, int64_t chunk, int64_t in,
                                       int64_t out, const Done& done) {
  const int64_t n = input.dims()[0], frames = input.dims()[1];
  check(input.dims().size() == 5 && (frames - 1) % in == 0, Code::invalid_config,
        "autoencoder: {} is not of videos whose frames are one and a multiple of {}", to_string(input.shape()), in);
  const int64_t latents = (frames - 1) / in;  // after the first
  if (latents == 0 || chunk < 1) return run(direction, input, done);
  HostArray whole;
  for (int64_t from = 0; from < n; from += batch_) {
    ArrayMap state;
    for (int64_t at = 0; at <= latents; at += at > 0 ? chunk : 1) {
      const bool first = at == 0;
      const HostArray part = run(
          direction, first ? direction.first : direction.next,
          first ? block(input, from, batch_, 0, 1) : block(input, from, batch_, 1 + (at - 1) * in, chunk * in), &state);
      if (!whole) {
        Dims dims = part.dims();
        dims[0] = n, dims[1] = 1 + latents * out;
        whole = HostArray(Shape{part.dtype(), dims});
      }
      set_block(whole, from, first ? 0 : 1 + (at - 1) * out, part);
    }
    if (done) done(std::min(batch_, n - from));
  }
  return whole;
}

HostArray MediaAutoencoder::encode(const HostArray& pixels, const Done& done) {
  if (const int64_t scale = family_->frame_scale(); scale > 0)
    return run_chunks(encoder_, pixels, chunks_.encode, scale, 1, done);
  return run(encoder_, pixels, done);
}

HostArray MediaAutoencoder::decode(const HostArray& latents, bool tiled) {
  if (const int64_t scale = family_->frame_scale(); scale > 0)
    return run_chunks(decoder_, latents, chunks_.decode, 1, scale);
  const int64_t tile = family_->decoder_tile();
  if (tiled && tile > 0 && std::max(latents.dims()[1], latents.dims()[2]) > tile)
    return decode_in_tiles(latents, tile, family_->downscale(), [this](const HostArray& part) { return decode(part); });
  return run(decoder_, latents);
}

}  // namespace md
