// Dynamic quantization: products of layers computed on 8-bit copies of their input and weight, which are made anew each
// time from the values as they are stored. Ranges, rounding and gradients are those of qwix 0.1 (QtProvider under the
// rules of MaxDiffusion's wan_pipeline.py), except that scales are f32 whatever the layer computes in.
#pragma once

#include <memory>
#include <optional>
#include <regex>
#include <string>

#include "maxdiffusion/nn/scope.h"

namespace md {

/// How far a tensor is taken to reach from zero; what lies beyond is clipped.
struct Calibration {
  enum class Method { absmax, rms, fixed };
  Method method = Method::absmax;
  double factor = 1;  // of the largest magnitude, of the root mean square; fixed: the bound itself
  bool clips() const { return method != Method::absmax || factor < 1; }
};
/// "absmax", "absmax,0.9", "rms,3", "fixed,4" or "fixed,-4,4". Throws invalid_config, naming the key, for another.
Calibration parse_calibration(const std::string& key, const std::string& text);

/// A tensor as integers or 8-bit floats times a scale.
struct Quantized {
  Tensor values;  // in the type asked for, shape of x
  Tensor scale;   // f32, rank of x, sizes of 1 along axes that share a range
  Tensor bound;   // like scale: the largest magnitude that is not clipped
};
/// x ≈ values · scale. `own`: axes whose positions have ranges of their own. Floats round to nearest even; integers
/// too, to 127.5 of the bound, so that the last of them is used as much as the others; the bound itself is ±127.
Quantized quantize(Tensor x, DType type, const Axes& own = {}, const Calibration& calibration = {});

/// What the key `quantization` names, for the modules that the key `qwix_module_path` matches.
struct Quantization {
  std::string name;
  DType operands = DType::s8;
  /// Types of the cotangents in the gradients' products. Absent: those products are not quantized.
  std::optional<DType> linear_gradient, convolution_gradient;
  /// Ranges of their own for each row of a linear layer's input, each sample of a convolution's, each output of a
  /// weight. Otherwise one range for a tensor, which is what quantized gradients need.
  bool per_channel = true;
  Calibration weight, activation, gradient;
  std::string module_path = ".*";  // as the key says it
  std::regex modules{".*"};

  /// Whether the whole path of a module, as in "blocks.0.attn1.to_q", is matched. A stacked block counts as its first.
  bool covers(const std::string& path) const;
};
bool is_float8(DType type);

/// f(x, w) of quantized operands, in the type of x. f is of a linear layer where w has two sizes, else of a
/// convolution, whose samples lie along axis 0 of x. Gradients, as in qwix:
/// linear layers: those of f at x and w themselves; convolutions: at what the quantized ones stand for; with types of
/// their own for cotangents: of f at the quantized operands, for a quantized cotangent, and none where a linear layer's
/// operand was clipped. w is as it is stored on the mesh, by the logical `axes`; what is gathered is quantized, but for
/// the gradients of linear layers that are not. Keeps q and f.
Tensor quantized_product(std::shared_ptr<const Quantization> q, Tensor x, Tensor w, const LogicalAxes& axes,
                         const Product& f);

struct QuantizedCount {
  int64_t quantized = 0, all = 0;
};
/// Linear and convolution layers in the table, which was traced with the options of the run. Throws invalid_config
/// where module_path matches none of them, or only some of the blocks that scan_layers has stacked.
QuantizedCount count_quantized(const Quantization& q, const ParamTable& params);

}  // namespace md
