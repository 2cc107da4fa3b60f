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

MediaChunks MediaChunkKeys::chunks(const Autoencoder& autoencoder) const {
  const int64_t scale = std::max<int64_t>(autoencoder.frame_scale, 1);
  check(vae_encode_chunk == -1 || vae_encode_chunk > 0, Code::invalid_config,
        "vae_encode_chunk is {}; expected -1 or at least 1", vae_encode_chunk);
  check(vae_decode_chunk == -1 || vae_decode_chunk > 0, Code::invalid_config,
        "vae_decode_chunk is {}; expected -1 or at least 1", vae_decode_chunk);
  const bool whole = vae_encode_chunk < 0 || autoencoder.encodes_whole;
  return {whole ? -1 : std::max<int64_t>(vae_encode_chunk / scale, 1), vae_decode_chunk};
}

MediaAutoencoder::MediaAutoencoder(const Devices& devices, std::shared_ptr<const Autoencoder> autoencoder,
                                   HostArrays weights, int64_t batch, const ScopeOptions& scope,
                                   const CompileConfig& compile, const EncoderKeys& keys, MediaChunks chunks,
                                   int64_t bytes)
    : devices_(devices),
      autoencoder_(std::move(autoencoder)),
      weights_(std::move(weights)),
      batch_(batch),
      bytes_(bytes),
      scope_(autoencoder_options(scope, keys)),
      compile_(compile),
      chunks_(chunks) {
  encoder_ = {.name = "media_encoder",
              .build =
                  [a = autoencoder_](const Models& models, Tensor pixels, MediaState* state) {
                    const Tensor x = pixels.dtype() == DType::u8 ? pixels_to_float(pixels) : pixels;
                    const Posterior q = a->encode(models, x, state);
                    const Tensor mean = cast(q.mean, DType::f32);
                    return concatenate({mean, q.logvar ? exp(cast(q.logvar, DType::f32) * 0.5) : zeros_like(mean)}, -1);
                  },
              .scale = 1};
  decoder_ = {.name = "media_decoder",
              .build = [a = autoencoder_](const Models& models, Tensor latents,
                                          MediaState* state) { return a->decode(models, latents, state); },
              .scale = autoencoder_->downscale};
  publisher_ = {.name = "published_latents",
                .build = [a = autoencoder_](const Models& models, Tensor latents,
                                            MediaState*) { return a->published_latents(models, latents); },
                .scale = 1};
}

const Program& MediaAutoencoder::program(const Direction& direction, Stage& stage, const HostArray& input,
                                         const ArrayMap* state) {
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
    const bool continues = !memory.empty();
    g.output("out", direction.build(models, g.input("in", input.shape(), axes), &memory));
    for (size_t i = 0; state && i < memory.size(); ++i) {
      g.output(name_of(i), memory[i], continues ? name_of(i) : "in");
      if (continues) g.alias(name_of(i), name_of(i));
    }
    found =
        stage.emplace(std::pair{input.dtype(), input.dims()}, md::compile(devices_, g, compile_, direction.name)).first;
    HostArrays missing;
    for (const auto& [name, a] : component_weights(params, autoencoder_->component, weights_))
      if (!placed_.contains(name)) missing[name] = a;
    place(devices_, found->second, missing, placed_);
  }
  return found->second;
}

HostArray MediaAutoencoder::run(const Direction& direction, Stage& stage, const HostArray& input, ArrayMap* state) {
  const Program& compiled = program(direction, stage, input, state);
  ArrayMap feed;
  if (state) feed = std::move(*state);
  place(devices_, compiled, HostArrays{{"in", input}}, feed);
  ArrayMap results = compiled.run(feed, placed_);
  HostArray out = devices_.get(results.at("out"));
  results.erase("out");
  if (state) *state = std::move(results);
  return out;
}

int64_t MediaAutoencoder::samples_at_once(Direction& direction, const HostArray& input, int64_t left, int64_t frames) {
  // Upper bound over all known autoencoders. Below the bound a program need not be compiled to know its memory.
  constexpr int64_t kMostOfPixel = 4096;
  const size_t rank = input.dims().size();
  const int64_t on_host = devices_.platform() == Platform::cpu ? devices_.mesh().devices() : 1;
  const int64_t side = input.dims()[rank - 3] * direction.scale, other = input.dims()[rank - 2] * direction.scale,
                one = devices_.mesh().devices(), most = std::max<int64_t>(batch_ / one, 1), bytes = bytes_ / on_host;
  if (side * other * frames <= bytes / kMostOfPixel / most) return batch_;
  if (rank == 5) return one;  // chunks also keep a state in memory
  const auto plan = program(direction, direction.whole, rows(input, 0, one), nullptr).memory();
  if (!plan) return one;
  const int64_t each = std::max<int64_t>(plan->temporary + plan->outputs, 1);
  const int64_t fit = std::clamp<int64_t>(bytes / each, 1, most) * one;
  return left < fit ? one : fit;
}

HostArray MediaAutoencoder::run(Direction& direction, const HostArray& input) {
  HostArray whole;
  const int64_t frames =
      input.dims().size() == 5 ? input.dims()[1] * std::max<int64_t>(autoencoder_->frame_scale, 1) : 1;
  for (int64_t n = input.dims()[0], from = 0; from < n;) {
    const int64_t count = samples_at_once(direction, input, n - from, frames);
    add_rows(whole, n, from, run(direction, direction.whole, rows(input, from, count), nullptr));
    from = std::min(from + count, n);
    if (direction.done) direction.done(from);
  }
  return whole;
}

HostArray MediaAutoencoder::run_chunks(Direction& direction, const HostArray& input, int64_t chunk, int64_t in,
                                       int64_t out) {
  const int64_t n = input.dims()[0], frames = input.dims()[1];
  check(input.dims().size() == 5 && (frames - 1) % in == 0, Code::invalid_config,
        "autoencoder: videos are {}; expected 1 frame plus a multiple of {}", to_string(input.shape()), in);
  const int64_t latents = (frames - 1) / in;  // after the first frame
  if (latents == 0 || chunk < 1) return run(direction, input);
  HostArray whole;
  for (int64_t from = 0; from < n;) {
    const int64_t count = samples_at_once(direction, input, n - from, chunk * std::max(in, out));
    ArrayMap state;
    for (int64_t done = 0; done <= latents; done += done > 0 ? chunk : 1) {
      const bool first = done == 0;
      const HostArray part = run(
          direction, first ? direction.first : direction.next,
          first ? block(input, from, count, 0, 1) : block(input, from, count, 1 + (done - 1) * in, chunk * in), &state);
      if (!whole) {
        Dims dims = part.dims();
        dims[0] = n, dims[1] = 1 + latents * out;
        whole = HostArray(Shape{part.dtype(), dims});
      }
      set_block(whole, from, first ? 0 : 1 + (done - 1) * out, part);
    }
    from = std::min(from + count, n);
    if (direction.done) direction.done(from);
  }
  return whole;
}

HostArray MediaAutoencoder::encode(const HostArray& pixels, const std::function<void(int64_t)>& encoded) {
  encoder_.done = encoded;
  if (const int64_t scale = autoencoder_->frame_scale; scale > 0)
    return run_chunks(encoder_, pixels, chunks_.encode, scale, 1);
  return run(encoder_, pixels);
}

HostArray MediaAutoencoder::latents(const HostArray& pixels) {
  const HostArray moments = encode(pixels);
  Dims dims = moments.dims();
  const int64_t both = dims.back();
  int64_t cells = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) cells *= dims[i];
  dims.back() = both / 2;
  const HostArray means = block(moments.reshaped({cells, both}), 0, cells, 0, both / 2).reshaped(dims);
  return autoencoder_->latent_scale.apply(means);
}

HostArray MediaAutoencoder::published(const HostArray& latents) { return run(publisher_, latents); }

HostArray MediaAutoencoder::decode(const HostArray& latents, bool tiled) {
  if (const int64_t scale = autoencoder_->frame_scale; scale > 0)
    return run_chunks(decoder_, latents, chunks_.decode, 1, scale);
  const int64_t tile = autoencoder_->decoder_tile;
  if (tiled && tile > 0 && std::max(latents.dims()[1], latents.dims()[2]) > tile)
    return decode_in_tiles(latents, tile, autoencoder_->downscale,
                           [this](const HostArray& part) { return decode(part); });
  return run(decoder_, latents);
}

}  // namespace md
