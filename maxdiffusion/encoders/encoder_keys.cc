#include "maxdiffusion/encoders/encoder_keys.h"

#include <fmt/ranges.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/float_dtype.h"
#include "maxdiffusion/base/log.h"

namespace md {

ScopeOptions denoiser_options(const LayerKeys& keys, const Devices& devices, const ModelFolder& folder,
                              const Family& family) {
  ScopeOptions options = scope_options(keys);
  if (const Quantization* q = options.quantization.get()) {
    const pjrt::Client& client = devices.client();
    check(!is_float8(q->operands) || client.has_float8(), Code::invalid_config,
          "quantization={}: device '{}' has no 8-bit floats; try quantization=int8", q->name,
          client.devices().front().kind);
    const QuantizedCount count = count_quantized(*q, folder.params(family.spec().denoisers, options));
    log_info("quantization {}: {} of {} layers of {}", q->name, count.quantized, count.all,
             fmt::join(family.spec().denoisers, " and "));
  }
  if (options.blocks_to_swap > 0) {
    const ParamTable params = folder.params(family.spec().denoisers, options);
    for (const std::string& denoiser : family.spec().denoisers)
      check(options.blocks_to_swap <= params.blocks(denoiser), Code::invalid_config,
            "blocks_to_swap is {}; expected at most {}: {} has no more blocks that repeat", options.blocks_to_swap,
            params.blocks(denoiser), denoiser);
  }
  return options;
}

ScopeOptions text_encoder_options(ScopeOptions scope, const EncoderKeys& keys) {
  scope.weights = scope.activations = parse_float_dtype("text_encoder_dtype", keys.text_encoder_dtype);
  scope.trainable = false;
  scope.quantization = nullptr;
  scope.blocks_to_swap = 0;
  scope.few_bits =
      make_few_bits("text_encoder_base_weights_dtype", keys.text_encoder_base_weights_dtype, {kOutsideBlocks});
  scope.dropout = 0;
  return scope;
}

ScopeOptions autoencoder_options(ScopeOptions scope, const EncoderKeys& keys) {
  scope.weights = parse_float_dtype("vae_weights_dtype", keys.vae_weights_dtype);
  scope.activations = parse_float_dtype("vae_dtype", keys.vae_dtype);
  scope.replicated = keys.replicate_vae;
  scope.trainable = false;
  scope.quantization = nullptr;
  scope.blocks_to_swap = 0;
  scope.few_bits = nullptr;
  scope.dropout = 0;
  return scope;
}

}  // namespace md
