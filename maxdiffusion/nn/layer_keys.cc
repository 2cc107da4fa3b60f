#include "maxdiffusion/nn/layer_keys.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <memory>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/float_dtype.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/ops/attention.h"

namespace md {
namespace {

RematNames remat_names(const LayerKeys& k) {
  auto check_names = [](const char* key, const std::vector<std::string>& names) {
    for (const std::string& name : names)
      check(std::ranges::find(value::kAll, name) != std::end(value::kAll), Code::invalid_config,
            "{} holds '{}'; expected one of: {}", key, name,
            nearest_first(name, {std::begin(value::kAll), std::end(value::kAll)}));
  };
  check_names("names_which_can_be_saved", k.names_which_can_be_saved);
  check_names("names_which_can_be_offloaded", k.names_which_can_be_offloaded);
  for (const std::string& name : k.names_which_can_be_saved)
    check(std::ranges::count(k.names_which_can_be_offloaded, name) == 0, Code::invalid_config,
          "names_which_can_be_saved and names_which_can_be_offloaded both have '{}'; a value is saved on the device or "
          "offloaded to the host",
          name);
  return {k.names_which_can_be_saved, k.names_which_can_be_offloaded};
}

/// Sizes of MaxDiffusion's kernels that have no equivalent are ignored and named in a log line.
AttentionBlocks attention_blocks(const std::map<std::string, std::string>& sizes) {
  constexpr std::string_view kIgnored[] = {"block_kv_compute_in", "heads_per_tile", "vmem_limit_bytes"},
                             kFused = "use_fused_bwd_kernel";
  AttentionBlocks blocks;
  const std::map<std::string_view, int64_t*> ours = {{"block_q", &blocks.queries},
                                                     {"block_kv", &blocks.keys},
                                                     {"block_kv_compute", &blocks.keys_compute},
                                                     {"block_q_dkv", &blocks.gradient_queries},
                                                     {"block_kv_dkv", &blocks.gradient_keys},
                                                     {"block_kv_dkv_compute", &blocks.gradient_keys_compute},
                                                     {"block_q_dq", &blocks.dq_queries},
                                                     {"block_kv_dq", &blocks.dq_keys}};
  std::vector<std::string_view> names = {kFused}, ignored;
  for (const auto& [name, target] : ours) names.push_back(name);
  names.insert(names.end(), std::begin(kIgnored), std::end(kIgnored));
  for (const auto& [name, text] : sizes) {
    check(std::ranges::find(names, name) != names.end(), Code::invalid_config,
          "flash_block_sizes: unknown field '{}'; expected one of: {}", name, fmt::join(names, ", "));
    if (name == kFused) {
      std::string word = text;
      std::ranges::transform(word, word.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      check(word == "true" || word == "false", Code::invalid_config,
            "flash_block_sizes: {} is '{}'; expected true or false", name, text);
      blocks.fused_gradient = word == "true" ? AttentionBlocks::Fused::yes : AttentionBlocks::Fused::no;
      continue;
    }
    const auto found = ours.find(name);
    if (found == ours.end()) {
      ignored.push_back(name);
      continue;
    }
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *found->second);
    check(error == std::errc() && end == text.data() + text.size() && *found->second > 0, Code::invalid_config,
          "flash_block_sizes: {} is '{}'; expected a whole number above 0", name, text);
  }
  if (!ignored.empty())
    log_line_once(LogLevel::warning, fmt::format("flash_block_sizes: {} {} ignored: these kernels have no such block",
                                                 fmt::join(ignored, ", "), ignored.size() == 1 ? "is" : "are"));
  return blocks;
}

}  // namespace

ScopeOptions scope_options(const LayerKeys& k) {
  ScopeOptions o{.weights = parse_float_dtype("weights_dtype", k.weights_dtype),
                 .activations = parse_float_dtype("activations_dtype", k.activations_dtype),
                 .attention = k.attention,
                 .flash_min_seq_length = k.flash_min_seq_length,
                 .attention_blocks = attention_blocks(k.flash_block_sizes),
                 .remat = k.remat_policy,
                 .remat_names = remat_names(k),
                 .scan_layers = k.scan_layers,
                 .blocks_to_swap = k.blocks_to_swap,
                 .dropout = k.dropout,
                 .quantization = make_quantization(k.quantization),
                 .few_bits = make_few_bits("base_weights_dtype", k.base_weights_dtype, k.base_quantization_skip)};
  if (k.enable_tile_search)
    o.attention_blocks.search = std::make_shared<const BlockSearch>(
        BlockSearch{.full = k.tile_search_mode == "full", .runs = k.tile_search_iters, .folder = k.tile_search_out});
  check(k.dropout >= 0 && k.dropout < 1, Code::invalid_config,
        "dropout is {}; expected a probability of at least 0 and below 1", k.dropout);
  check(k.blocks_to_swap == 0 || k.scan_layers, Code::invalid_config,
        "blocks_to_swap is {} and scan_layers is false; expected scan_layers=true: blocks are copied in a loop",
        k.blocks_to_swap);
  check_attention_kernel(k.attention);
  remat_policy(k.remat_policy);
  if (k.precision == "HIGHEST")
    o.precision = Precision::highest;
  else if (k.precision == "HIGH")
    o.precision = Precision::high;
  else
    check(k.precision == "DEFAULT", Code::invalid_config, "precision is '{}'; expected one of: DEFAULT, HIGH, HIGHEST",
          k.precision);
  return o;
}

}  // namespace md
