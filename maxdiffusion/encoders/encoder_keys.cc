#include "maxdiffusion/encoders/encoder_keys.h"

#include "maxdiffusion/base/float_dtype.h"

namespace md {

ScopeOptions text_encoder_options(ScopeOptions scope, const EncoderKeys& keys) {
  scope.weights = scope.activations = parse_float_dtype("text_encoder_dtype", keys.text_encoder_dtype);
  scope.trainable = false;
  scope.quantization = nullptr;
  scope.dropout = 0;
  return scope;
}

ScopeOptions autoencoder_options(ScopeOptions scope, const EncoderKeys& keys) {
  scope.weights = parse_float_dtype("vae_weights_dtype", keys.vae_weights_dtype);
  scope.activations = parse_float_dtype("vae_dtype", keys.vae_dtype);
  scope.replicated = keys.replicate_vae;
  scope.trainable = false;
  scope.quantization = nullptr;
  scope.dropout = 0;
  return scope;
}

}  // namespace md
