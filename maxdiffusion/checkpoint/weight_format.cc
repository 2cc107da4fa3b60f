#include "maxdiffusion/checkpoint/weight_format.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

// Scaled numbers of 8 bits: values · scale, the scale of the tensor or of each row. ComfyUI calls it
// MODULE.scale_weight, Black Forest Labs' files and others MODULE.weight_scale. Source: diffusers, quantizers/bfl
// (dequantize_fp8r).

std::optional<std::vector<std::string>> scale_beside(const HostArrays& file, const std::string& tensor) {
  const DType type = file.at(tensor).dtype();
  if (size_of(type) > 1 || !tensor.ends_with(".weight")) return std::nullopt;
  const std::string module = module_of(tensor);
  check(!file.contains(module + ".weight_scale_2"), Code::invalid_config,
        "'{}' holds {} in blocks of 16 with two scales (nvfp4), which is not supported; expected a file of the same "
        "model "
        "in bfloat16, float16 or scaled float8_e4m3fn",
        tensor, to_string(type));
  for (const char* scale : {".scale_weight", ".weight_scale"})
    if (file.contains(module + scale)) return std::vector{module + scale};
  return std::nullopt;
}

bool is_scale_extra(const std::string& tensor) {
  return tensor.ends_with(".scale_input") || tensor.ends_with(".input_scale") || tensor == "scaled_fp8" ||
         tensor.ends_with(".scaled_fp8");
}

HostArray times_scale(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  const HostArray &scale = companions.at(0), factors = scale.cast(DType::f32);
  const int64_t count = scale.shape().elements(), rows = values.dims().empty() ? 1 : values.dims()[0];
  check(is_float(scale.dtype()) && (count == 1 || count == rows), Code::io,
        "'{}' is {} and its scale {}; expected one number, or one for each of {} rows", tensor,
        to_string(values.shape()), to_string(scale.shape()), rows);
  HostArray out = values.cast(DType::f32);
  const auto y = out.mutable_view<float>();
  const auto s = factors.view<float>();
  const size_t row = y.size() / static_cast<size_t>(std::max<int64_t>(rows, 1));
  for (size_t i = 0; i < y.size(); ++i) y[i] *= s[count == 1 ? 0 : i / row];
  return out;
}

// The first that takes a tensor reads it.
constexpr WeightFormat kFormats[] = {{"scaled float8", scale_beside, is_scale_extra, times_scale}};

}  // namespace

FoundFormat format_of(const HostArrays& file, const std::string& tensor) {
  for (const WeightFormat& f : kFormats)
    if (auto companions = f.companions(file, tensor)) return {&f, std::move(*companions)};
  return {};
}

bool is_format_extra(const std::string& tensor) {
  return std::ranges::any_of(kFormats, [&](const WeightFormat& f) { return f.is_extra(tensor); });
}

}  // namespace md
