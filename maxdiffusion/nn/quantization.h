// Dynamic quantization: products of layers use 8-bit copies of their input and weight, quantized at each use. Ranges,
// rounding and gradients are those of qwix 0.1 (QtProvider under the rules of MaxDiffusion's wan_pipeline.py), except
// that scales are always f32.
#pragma once

#include <memory>
#include <optional>
#include <regex>
#include <string>

#include "maxdiffusion/nn/scope.h"

namespace md {

/// The range of a tensor: larger magnitudes are clipped.
struct Calibration {
  enum class Method { absmax, rms, fixed };
  Method method = Method::absmax;
  double factor = 1;  // of the largest magnitude or the root mean square; fixed: the bound itself
  bool clips() const { return method != Method::absmax || factor < 1; }
};
/// Parses "absmax", "absmax,0.9", "rms,3", "fixed,4" or "fixed,-4,4". Throws invalid_config, naming the key, for other
/// texts.
Calibration parse_calibration(const std::string& key, const std::string& text);

/// A tensor as integers or 8-bit floats times a scale.
struct Quantized {
  Tensor values;  // in the requested type, shape of x
  Tensor scale;   // f32, rank of x, sizes of 1 along axes that share a range
  Tensor bound;   // like scale: the largest magnitude that is not clipped
};
/// x ≈ values · scale. `channel_axes`: axes with separate ranges (per-channel). Rounds to nearest even; integers: the
/// bound is ±127.5, clipped to ±127.
Quantized quantize(Tensor x, DType type, const Axes& channel_axes = {}, const Calibration& calibration = {});

/// Settings of the key `quantization`, for the modules that the key `qwix_module_path` matches.
struct Quantization {
  std::string name;
  DType operands = DType::s8;
  /// Types of the cotangents in the gradients' products. Absent: those products are not quantized.
  std::optional<DType> linear_gradient, convolution_gradient;
  /// Separate ranges for each row of a linear layer's input, each sample of a convolution's, each output of a weight.
  /// false: one range per tensor, as quantized gradients need.
  bool per_channel = true;
  Calibration weight, activation, gradient;
  std::string module_path = ".*";  // value of the key
  std::regex modules{".*"};

  /// Whether the whole path of a module, as in "blocks.0.attn1.to_q", is matched. A stacked block is matched by its
  /// first layer.
  bool covers(const std::string& path) const;
};
bool is_float8(DType type);

/// f(x, w) with quantized operands, in the type of x. f is a linear layer if w has rank 2, else a convolution with the
/// batch on axis 0 of x. Gradients, as in qwix: linear layers: of f at x and w; convolutions: at the dequantized
/// operands; with cotangent types: of f at the quantized operands for a quantized cotangent, and zero where a linear
/// layer's operand was clipped. w is sharded as stored, by the logical `axes`; its quantized form is gathered, except
/// for unquantized gradients of linear layers. Stores q and f.
Tensor quantized_product(std::shared_ptr<const Quantization> q, Tensor x, Tensor w, const LogicalAxes& axes,
                         const Product& f);

struct QuantizedCount {
  int64_t quantized = 0, all = 0;
};
/// Counts linear and convolution layers in the table, which was traced with the options of the run. Throws
/// invalid_config if module_path matches none of them, or only some of the blocks that scan_layers has stacked.
QuantizedCount count_quantized(const Quantization& q, const ParamTable& params);

}  // namespace md
