// Keys of data types, attention, remat and dropout of layers.
#pragma once

#include <map>
#include <string>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/nn/quantization_keys.h"

namespace md {

struct LayerKeys {
  std::string weights_dtype = "float32", activations_dtype = "bfloat16", precision = "DEFAULT",
              attention = "dot_product", remat_policy = "NONE";
  std::vector<std::string> names_which_can_be_saved, names_which_can_be_offloaded;
  bool scan_layers = false;
  int64_t blocks_to_swap = 0;
  int64_t flash_min_seq_length = 256;
  std::map<std::string, std::string> flash_block_sizes;
  bool enable_tile_search = false;
  std::string tile_search_mode = "smart", tile_search_out;
  int64_t tile_search_iters = 10;
  QuantizationKeys quantization;
  double dropout = 0;
  std::string base_weights_dtype;
  std::vector<std::string> base_quantization_skip = {kOutsideBlocks};
  template <class V>
  void visit(V&& v) {
    v("weights_dtype", weights_dtype, "dtype parameters are stored in");
    v("base_weights_dtype", base_weights_dtype,
      "what the matrices of a frozen denoiser are stored in, of LoRA training and of sampling: float8_e4m3fn, int8 "
      "(both: a scale for each row) or nf4; empty: weights_dtype",
      one_of_or_empty({"float8_e4m3fn", "int8", "nf4"}));
    v("base_quantization_skip", base_quantization_skip,
      "parts of module names whose matrices are not stored as base_weights_dtype says; outside_blocks: those in no "
      "numbered block (embeddings, first and last layers)");
    v("activations_dtype", activations_dtype, "compute dtype given to layers");
    v("precision", precision, "matrix product precision", one_of({"DEFAULT", "HIGH", "HIGHEST"}));
    v("attention", attention, "attention kernel");
    v("remat_policy", remat_policy,
      "what the forward pass saves: NONE (all), FULL (block inputs), MATMUL_WITHOUT_BATCH, HIDDEN_STATE_WITH_OFFLOAD, "
      "OFFLOAD_MATMUL_WITHOUT_BATCH, FLUX_OPTIMIZED, CUSTOM");
    v("names_which_can_be_saved", names_which_can_be_saved, "values that remat_policy CUSTOM saves on the device");
    v("names_which_can_be_offloaded", names_which_can_be_offloaded,
      "values that remat_policy CUSTOM offloads to the host's memory");
    v("scan_layers", scan_layers, "repeated blocks as one loop over stacked parameters");
    v("blocks_to_swap", blocks_to_swap,
      "number of leading blocks of the denoiser whose frozen matrices stay in host memory and are copied to the "
      "device, "
      "the next block's while one runs; with scan_layers, for LoRA training and sampling; 0: none",
      in_range(0, 1000));
    v("flash_min_seq_length", flash_min_seq_length, "below this length flash attention falls back to dot_product");
    v("flash_block_sizes", flash_block_sizes,
      "sizes of blocks of flash attention, as {block_q: 1024, block_kv: 2048, block_q_dkv: 512, block_kv_dkv: 512}");
    v("enable_tile_search", enable_tile_search,
      "on TPUs: block sizes that flash_block_sizes does not set are measured on the device, before the first step");
    v("tile_search_mode", tile_search_mode,
      "the sizes that enable_tile_search tries: smart (256, 512, 1024, 2048 and the default) or full (all multiples of "
      "256 up to 4096)",
      one_of({"smart", "full"}));
    v("tile_search_iters", tile_search_iters, "timed runs of each combination of sizes", in_range(1, 1000));
    v("tile_search_out", tile_search_out, "folder of CSV files with all of the search's timings; empty: none",
      KeyPath::output);
    quantization.visit(v);
    v("dropout", dropout, "probability with which the trained model's dropout layers drop a value; 0: none",
      in_range(0, below(1)));
  }
};

/// The layer options of the keys. Throws invalid_config for an unknown name.
ScopeOptions scope_options(const LayerKeys& keys);

}  // namespace md
