#include "maxdiffusion/nn/quantization_keys.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"

namespace md {
namespace {

/// A value of the key `quantization`.
struct Kind {
  const char* name;
  DType operands;
  std::optional<DType> linear_gradient, convolution_gradient;
  bool per_channel;  // if true, ranges are always absmax
};
constexpr Kind kKinds[] = {
    {"int8", DType::s8, {}, {}, true},
    {"fp8", DType::f8e4m3fn, {}, {}, true},
    {"fp8_full", DType::f8e4m3fn, DType::f8e5m2, DType::f8e4m3fn, false},
};

const Kind& kind_of(const QuantizationKeys& k) {
  check(!k.quantization.empty(), Code::invalid_config,
        "Quantization type is not set when use_qwix_quantization is enabled. quantization is empty; expected int8, fp8 "
        "or fp8_full");
  for (const Kind& kind : kKinds)
    if (k.quantization == kind.name) return kind;
  fail(
      Code::invalid_config,
      "Quantization type is not supported when use_qwix_quantization is enabled: {}. quantization is not one of: int8, "
      "fp8, fp8_full",
      k.quantization);
}

/// Key and value for one kind of tensor; the key for all kinds if it is empty.
std::pair<std::string, std::string> named_value(const QuantizationKeys& k, const char* key, const std::string& value) {
  if (value.empty()) return {"quantization_calibration_method", k.quantization_calibration_method};
  return {key, value};
}

}  // namespace

void QuantizationKeys::warn() const {
  if (!use_qwix_quantization && !quantization.empty())
    log_warning("quantization is ignored: use_qwix_quantization is false");
  if (quantization_local_shard_count != -1)
    log_warning("quantization_local_shard_count is ignored: ranges are taken of whole tensors");
  if (!use_qwix_quantization || !kind_of(*this).per_channel) return;
  for (const auto& [key, value] :
       {std::pair{"quantization_calibration_method", &quantization_calibration_method},
        std::pair{"weight_quantization_calibration_method", &weight_quantization_calibration_method},
        std::pair{"act_quantization_calibration_method", &act_quantization_calibration_method},
        std::pair{"bwd_quantization_calibration_method", &bwd_quantization_calibration_method}})
    if (!value->empty() && *value != "absmax")
      log_warning("{} is ignored: only quantization=fp8_full reads it, {} finds ranges by absmax", key, quantization);
}

std::shared_ptr<const Quantization> make_quantization(const QuantizationKeys& k) {
  if (!k.use_qwix_quantization) return nullptr;
  const Kind& kind = kind_of(k);
  auto q = std::make_shared<Quantization>();
  q->name = kind.name;
  q->operands = kind.operands;
  q->linear_gradient = kind.linear_gradient;
  q->convolution_gradient = kind.convolution_gradient;
  q->per_channel = kind.per_channel;
  if (!kind.per_channel) {
    auto parsed = [&](const char* key, const std::string& value) {
      const auto [from, text] = named_value(k, key, value);
      return parse_calibration(from, text);
    };
    q->weight = parsed("weight_quantization_calibration_method", k.weight_quantization_calibration_method);
    q->activation = parsed("act_quantization_calibration_method", k.act_quantization_calibration_method);
    q->gradient = parsed("bwd_quantization_calibration_method", k.bwd_quantization_calibration_method);
  }
  q->module_path = k.qwix_module_path;
  try {
    q->modules = std::regex(k.qwix_module_path);
  } catch (const std::regex_error& e) {
    fail(Code::invalid_config, "qwix_module_path '{}' is not a regular expression: {}", k.qwix_module_path, e.what());
  }
  return q;
}

}  // namespace md
