#include "maxdiffusion/nn/layer_keys.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/attention.h"

namespace md {
namespace {

/// Names that models give to values inside their blocks.
constexpr std::string_view kNamedValues[] = {"hidden_states", "self_attn",      "cross_attn",    "attn_output",
                                             "query_proj",    "key_proj",       "value_proj",    "xq_out",
                                             "xk_out",        "ffn_activation", "key_proj_text", "value_proj_text",
                                             "key_proj_img",  "value_proj_img"};

std::vector<std::string> kept_names(const LayerKeys& k) {
  std::vector<std::string> all = k.names_which_can_be_saved;
  all.insert(all.end(), k.names_which_can_be_offloaded.begin(), k.names_which_can_be_offloaded.end());
  for (const std::string& name : all)
    check(std::ranges::find(kNamedValues, name) != std::end(kNamedValues), Code::invalid_config,
          "names_which_can_be_saved, names_which_can_be_offloaded: '{}' is not one of: {}", name,
          fmt::join(kNamedValues, ", "));
  return all;
}

}  // namespace

ScopeOptions scope_options(const LayerKeys& k) {
  ScopeOptions o{.weights = parse_dtype(k.weights_dtype),
                 .activations = parse_dtype(k.activations_dtype),
                 .attention = k.attention,
                 .flash_min_seq_length = k.flash_min_seq_length,
                 .remat = k.remat_policy,
                 .remat_names = kept_names(k),
                 .scan_layers = k.scan_layers,
                 .dropout = k.dropout};
  check(k.dropout >= 0 && k.dropout < 1, Code::invalid_config,
        "dropout is {}; expected a probability from 0 on and below 1", k.dropout);
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
