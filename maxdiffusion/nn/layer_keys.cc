#include "maxdiffusion/nn/layer_keys.h"

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/attention.h"

namespace md {

ScopeOptions scope_options(const LayerKeys& k) {
  ScopeOptions o{.weights = parse_dtype(k.weights_dtype),
                 .activations = parse_dtype(k.activations_dtype),
                 .attention = k.attention,
                 .flash_min_seq_length = k.flash_min_seq_length,
                 .remat = k.remat_policy,
                 .scan_layers = k.scan_layers};
  for (DType type : {o.weights, o.activations})
    check(is_float(type), Code::invalid_config, "dtype '{}' of weights or activations is no float", to_string(type));
  check_attention_kernel(k.attention);
  remat_policy(k.remat_policy);
  if (k.precision == "HIGHEST")
    o.precision = Precision::highest;
  else if (k.precision == "HIGH")
    o.precision = Precision::high;
  else
    check(k.precision == "DEFAULT", Code::invalid_config, "precision '{}' is not one of: DEFAULT, HIGH, HIGHEST",
          k.precision);
  return o;
}

}  // namespace md
