// How models store and compute: the one that is trained or sampled, and those around it.
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
  bool replicate_vae = false;
  int64_t encoder_batch_size = 0;
  template <class V>
  void visit(V&& v) {
    v("text_encoder_dtype", text_encoder_dtype, "dtype that frozen text encoders store and compute in");
    v("vae_dtype", vae_dtype, "dtype that the frozen autoencoder computes in");
    v("vae_weights_dtype", vae_weights_dtype, "dtype that the frozen autoencoder's parameters are stored in");
    v("encoder_batch_size", encoder_batch_size,
      "samples that the autoencoder and the text encoders around training take at a time on each device; 0: as many as "
      "take no more memory than 1.5 GB, or a quarter of what a training step holds");
    v("replicate_vae", replicate_vae,
      "every device has the whole frozen autoencoder; false: its parameters are split as logical_axis_rules say");
  }
};

/// Options of a folder's denoisers, trained or sampled, by the keys. Throws invalid_config where layers are to be
/// quantized and the devices cannot, or no layer is.
ScopeOptions denoiser_options(const LayerKeys& keys, const Devices& devices, const ModelFolder& folder,
                              const Family& family);
/// Options of frozen text encoders, and of the frozen autoencoder: the types of the keys, no gradients, no dropout,
/// nothing quantized, the sharding of the autoencoder's parameters, everything else as in `scope`. Throw invalid_config
/// for a name that is not a float type.
ScopeOptions text_encoder_options(ScopeOptions scope, const EncoderKeys& keys);
ScopeOptions autoencoder_options(ScopeOptions scope, const EncoderKeys& keys);

}  // namespace md
