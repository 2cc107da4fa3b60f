// Captions to text embeddings and pictures to latent moments: what the UNet is trained on and sampled with.
// Source: Podell et al. 2023 (SDXL), section 2.1; diffusers' `encode_prompt` of its SDXL pipeline.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/tasks/model_folder.h"

namespace md {

/// How models beside the one that is trained or sampled compute: in f32, otherwise as `scope` says.
ScopeOptions companion(ScopeOptions scope);

struct TextConditioning {
  Tensor prompt_embeds;  // [B, L, D] f32
  Tensor skipped;        // the same with clip_skip; absent without
  Tensor text_embeds;    // [B, P] f32, SDXL only
};
/// SDXL: the hidden states before the last layer of both encoders, side by side, and the projected end token of the
/// second. One encoder: its last hidden state after the final norm. `skipped`: clip_skip layers earlier in each, as in
/// diffusers. ids: [B, L] s32. Throws invalid_config where there are not so many layers.
TextConditioning text_conditioning(const ModelFolder& m, const Scope& encoder, Tensor ids, const Scope* encoder_2,
                                   Tensor ids_2, int64_t clip_skip = 0);

struct TextEmbeddings {
  HostArray prompt_embeds;  // f32 [N, L, D]
  HostArray text_embeds;    // f32 [N, P]; absent with one encoder
};

/// Text encoders with their weights on the devices, compiled for `batch` captions at a time.
class TextEncoder {
 public:
  /// `scope`: see companion. `clip_skip`: layers left out before the one that is read; see text_conditioning.
  TextEncoder(const Devices& devices, const ModelFolder& m, int64_t batch, const WeightsOf& weights,
              const ScopeOptions& scope, const CompileConfig& compile, int64_t clip_skip = 0);
  /// A caption longer than the encoder's positions is cut, with a named warning. `whole`: no layer is left out,
  /// whatever clip_skip says.
  TextEmbeddings encode(const std::vector<std::string>& captions, bool whole = false);
  /// Published name → array, by component: for checkpoints.
  const std::map<std::string, HostArrays>& weights() const { return weights_; }

 private:
  HostArray ids(const ClipTokenizer& tokenizer, const std::vector<std::string>& captions, size_t from) const;
  const Devices& devices_;
  const ModelFolder& model_;
  int64_t batch_, length_, clip_skip_;
  std::unique_ptr<Program> program_;
  ArrayMap arrays_;
  std::map<std::string, HostArrays> weights_;
};

/// The autoencoder, each half compiled on first use for `batch` pictures at a time. Weights are given by input name
/// ("vae/…") and are placed once per half. `scope`: see companion.
class PictureCoder {
 public:
  PictureCoder(const Devices& devices, const VaeConfig& vae, HostArrays weights, int64_t batch,
               const ScopeOptions& scope, const CompileConfig& compile);
  /// u8 [N, H, W, 3] → f32 [N, h, w, 2C]: mean and standard deviation of the posterior, unscaled.
  HostArray encode(const HostArray& pixels);
  /// f32 [N, h, w, C], unscaled → f32 [N, H, W, 3], in [−1, 1] up to error. `tiled`: latents larger than those of the
  /// autoencoder's sample_size in tiles.
  HostArray decode(const HostArray& latents, bool tiled = false);

 private:
  struct Half {
    Shape input;
    std::unique_ptr<Program> program;
    ArrayMap weights;
  };
  HostArray run(Half& half, const HostArray& input, const char* name,
                Tensor (*build)(const Scope&, const VaeConfig&, Tensor));
  const Devices& devices_;
  VaeConfig vae_;
  HostArrays weights_;
  int64_t batch_;
  ScopeOptions scope_;
  CompileConfig compile_;
  Half encoder_, decoder_;
};

/// The tables of the UNet's and the text encoders' parameters: what LoRA matrices can sit on.
ParamTable denoiser_params(const ModelFolder& m);
/// The table of the autoencoder's parameters.
ParamTable vae_params(const ModelFolder& m, DType weights);

}  // namespace md
