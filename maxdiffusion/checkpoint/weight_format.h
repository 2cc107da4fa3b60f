// Quantized weights in files: a tensor of few bits, and companion tensors, such as its scale. Weights are dequantized
// when they are read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

struct WeightFormat {
  const char* name;
  /// Names of the companion tensors of `tensor`; nothing: it is not in this format. Throws
  /// invalid_config naming what of the format is not supported.
  std::optional<std::vector<std::string>> (*companions)(const HostArrays& file, const std::string& tensor);
  /// Tensors of such files that are no weights and are not needed: scales of activations, marks.
  bool (*is_extra)(const std::string& tensor);
  /// The values in f32, of the tensor's shape. `companions`: the tensors of those names, in that order. Throws io
  /// naming `tensor` where their shapes do not fit.
  HostArray (*dequantize)(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor);
};

/// The first format that a tensor of a file is in, with the names of its companions; null: it is a plain array.
struct FoundFormat {
  const WeightFormat* format = nullptr;
  std::vector<std::string> companions;
};
FoundFormat format_of(const HostArrays& file, const std::string& tensor);
/// Whether a tensor of a file that holds a format's weights is one of its extras.
bool is_format_extra(const std::string& tensor);

}  // namespace md
