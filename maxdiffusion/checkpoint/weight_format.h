// Quantized weights in files: a quantized tensor and companion tensors, such as its scale. Weights are dequantized when
// they are read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

struct WeightFormat {
  const char* name;
  /// Names of the companion tensors of `tensor`; none if the tensor is not in this format. Throws invalid_config naming
  /// the part of the format that is not supported.
  std::optional<std::vector<std::string>> (*companions)(const HostArrays& file, const std::string& tensor);
  /// The sizes of the weight, from headers or companions; null: they equal the tensor's. Throws io naming `tensor` if
  /// they do not fit its bytes.
  Dims (*dims)(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor);
  /// Whether `tensor` is an extra tensor of such files, not needed for the weights: scales of activations, marks.
  bool (*is_extra)(const std::string& tensor);
  /// The f32 values, with the weight's sizes. `companions`: the companion tensors, in the order of their names. Throws
  /// io naming `tensor` if their shapes do not fit.
  HostArray (*dequantize)(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor);
};

/// A tensor's format and the names of its companions; null for a plain array. The first format that matches is used.
/// Throws invalid_config naming the mark of quantization, or the tensor next to it, that is not understood.
struct FoundFormat {
  const WeightFormat* format = nullptr;
  std::vector<std::string> companions;
};
FoundFormat format_of(const HostArrays& file, const std::string& tensor);
/// Throws invalid_config for a mark of quantization without a weight.
void check_marks(const HostArrays& file);
/// Whether a tensor of a file that holds a format's weights is one of its extras.
bool is_format_extra(const std::string& tensor);

}  // namespace md
