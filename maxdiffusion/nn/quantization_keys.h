// Keys of quantized products.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/nn/quantization.h"

namespace md {

struct QuantizationKeys {
  std::string quantization, qwix_module_path = ".*", quantization_calibration_method = "absmax",
                            weight_quantization_calibration_method, act_quantization_calibration_method,
                            bwd_quantization_calibration_method;
  bool use_qwix_quantization = false;
  int64_t quantization_local_shard_count = -1;
  template <class V>
  void visit(V&& v) {
    v("use_qwix_quantization", use_qwix_quantization,
      "linear and convolution layers of the denoiser multiply 8-bit copies (see `quantization`)");
    v("quantization", quantization,
      "int8, fp8 (both: ranges for rows and channels, gradients as without) or fp8_full (ranges for tensors, gradients "
      "too)");
    v("qwix_module_path", qwix_module_path,
      "regular expression of whole module names (blocks.0.attn1.to_q): what is quantized");
    v("quantization_calibration_method", quantization_calibration_method,
      "range that fp8_full quantizes to: absmax[,FACTOR], rms,FACTOR or fixed,-BOUND,BOUND");
    v("weight_quantization_calibration_method", weight_quantization_calibration_method,
      "range of weights with fp8_full; empty: quantization_calibration_method");
    v("act_quantization_calibration_method", act_quantization_calibration_method,
      "range of inputs with fp8_full; empty: quantization_calibration_method");
    v("bwd_quantization_calibration_method", bwd_quantization_calibration_method,
      "range of gradients with fp8_full; empty: quantization_calibration_method");
    v("quantization_local_shard_count", quantization_local_shard_count,
      "accepted for MaxDiffusion's files; ranges are taken of whole tensors, sharded or not");
  }

  /// Warns of keys that have no effect.
  void warn() const;
};

/// The quantization of the keys; null: none. Throws invalid_config for an unknown name or an invalid expression.
std::shared_ptr<const Quantization> make_quantization(const QuantizationKeys& keys);

}  // namespace md
