// Commands on LoRA files: put into a model, taken out of two, made thinner, looked at.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/convert/convert.h"
#include "maxdiffusion/lora/lora_keys.h"

namespace md {

/// Words of `lora extract`, beside the three paths.
struct ExtractKeys {
  int64_t rank = 16, conv_rank = 0;
  std::string layout, dtype = "float16";
  FolderKeys folder;
  template <class V>
  void visit(V&& v) {
    v("rank", rank, "rank of the matrices of linear layers");
    v("conv_rank", conv_rank, "rank of the matrices of convolutions larger than one pixel; 0: none");
    v("layout", layout, "layout of the keys; empty: the one that other programs for this model read",
      one_of_or_empty({"kohya", "comfyui", "diffusers"}));
    v("dtype", dtype, "dtype that is written: float32, bfloat16 or float16");
    folder.visit(v);
  }
};

/// Words of `lora resize`, beside the two paths.
struct ResizeKeys {
  std::optional<int64_t> rank;
  double energy = 1;
  std::string dtype;
  template <class V>
  void visit(V&& v) {
    v("rank", rank, "largest rank that is kept; null: set by energy");
    v("energy", energy, "part of each product's sum of squares that is kept");
    v("dtype", dtype, "dtype that is written: float32, bfloat16 or float16; empty: as stored");
  }
};

/// Writes the difference of two models of one kind, thinned, as a LoRA file that turns the first into the second. Says
/// how much of the differences it keeps, and what differs that such files do not hold.
void extract_lora(const std::string& base, const std::string& tuned, const std::string& to, const ExtractKeys& keys);
/// Writes a file of any layout with thinner matrices, under the same keys. Prints what each part keeps.
void resize_lora(const std::string& from, const std::string& to, const ResizeKeys& keys);
/// Prints rank, alpha, types, targets and metadata.
void print_lora(const std::string& file);

}  // namespace md
