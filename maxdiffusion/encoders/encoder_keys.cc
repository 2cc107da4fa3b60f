#include "maxdiffusion/encoders/encoder_keys.h"

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

DType float_type(const char* key, const std::string& name) {
  const DType type = parse_dtype(name);
  check(is_float(type), Code::invalid_config, "{} '{}' is no float", key, name);
  return type;
}

}  // namespace

ScopeOptions text_encoder_options(ScopeOptions scope, const EncoderKeys& keys) {
  scope.weights = scope.activations = float_type("text_encoder_dtype", keys.text_encoder_dtype);
  scope.trainable = false;
  scope.quantization = nullptr;
  scope.dropout = 0;
  return scope;
}

ScopeOptions autoencoder_options(ScopeOptions scope, const EncoderKeys& keys) {
  scope.weights = float_type("vae_weights_dtype", keys.vae_weights_dtype);
  scope.activations = float_type("vae_dtype", keys.vae_dtype);
  scope.replicated = keys.replicate_vae;
  scope.trainable = false;
  scope.quantization = nullptr;
  scope.dropout = 0;
  return scope;
}

}  // namespace md
