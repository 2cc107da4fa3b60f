// Keys of the frozen encoders (types, sharding, batch size), and the options of models that follow from keys.
#pragma once

#include <cstdint>
#include <string>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/nn/layer_keys.h"
#include "maxdiffusion/nn/scope.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct EncoderKeys {
  std::string text_encoder_dtype = "float32", vae_dtype = "float32", vae_weights_dtype = "float32";
  std::string text_encoder_base_weights_dtype;
  bool replicate_vae = false;
  int64_t encoder_batch_size = 0;
  template <class V>
  void visit(V&& v) {
    v("text_encoder_dtype", text_encoder_dtype, "dtype that frozen text encoders store and compute in");
    v("text_encoder_base_weights_dtype", text_encoder_base_weights_dtype,
      "what the matrices of frozen text encoders are stored in: float8_e4m3fn, int8 or nf4; empty: text_encoder_dtype",
      one_of_or_empty({"float8_e4m3fn", "int8", "nf4"}));
    v("vae_dtype", vae_dtype, "dtype that the frozen autoencoder computes in");
    v("vae_weights_dtype", vae_weights_dtype, "dtype that the frozen autoencoder's parameters are stored in");
    v("encoder_batch_size", encoder_batch_size,
      "samples that the autoencoder and the text encoders around training take at a time on each device; 0: as many as "
      "take no more memory than 1.5 GB, or a quarter of what a training step holds");
    v("replicate_vae", replicate_vae,
      "every device has the whole frozen autoencoder; false: its parameters are split as logical_axis_rules say");
  }
};

/// Options of a folder's denoisers, trained or sampled. Throws invalid_config if the keys request quantized layers but
/// the devices do not support them, or no layer matches.
ScopeOptions denoiser_options(const LayerKeys& keys, const Devices& devices, const ModelFolder& folder,
                              const Family& family);
/// Options of frozen text encoders, and of the frozen autoencoder: the types that the keys set, no gradients, no
/// dropout, nothing quantized, the autoencoder's sharding; everything else as in `scope`. Both throw invalid_config for
/// a name that is not a float type.
ScopeOptions text_encoder_options(ScopeOptions scope, const EncoderKeys& keys);
ScopeOptions autoencoder_options(ScopeOptions scope, const EncoderKeys& keys);

}  // namespace md
