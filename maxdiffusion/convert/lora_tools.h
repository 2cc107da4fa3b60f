// Commands on LoRA files: merge into a model, extract from two models, resize to a lower rank, print.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/convert/convert.h"
#include "maxdiffusion/lora/lora_keys.h"

namespace md {

/// Keys of `lora extract`, after the three paths.
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

/// Keys of `lora convert`, after the three paths.
struct LoraLayoutKeys {
  std::string layout, lora_missing_keys = kMissingKeys[0];
  FolderKeys folder;
  template <class V>
  void visit(V&& v) {
    v("layout", layout, "layout of the keys; empty: the one that other programs for this model read",
      one_of_or_empty({"kohya", "comfyui", "diffusers"}));
    LoraKeys::visit_missing_keys(v, lora_missing_keys);
    folder.visit(v);
  }
};

/// Keys of `lora resize`, after the two paths.
struct ResizeKeys {
  std::optional<int64_t> rank;
  double explained_variance = 1;
  std::string dtype;
  template <class V>
  void visit(V&& v) {
    v("rank", rank, "largest rank that is kept; null: set by explained_variance");
    v("explained_variance", explained_variance,
      "part of each product's sum of squares (squared singular values) that is kept");
    v("dtype", dtype, "dtype that is written: float32, bfloat16 or float16; empty: as stored");
  }
};

/// Writes the low-rank difference of two models of one class as a LoRA file that turns the first into the second. Logs
/// how much of the differences it keeps, and which differences such files cannot hold.
void extract_lora(const std::string& base, const std::string& tuned, const std::string& to, const ExtractKeys& keys);
/// Writes a LoRA file of any layout with lower rank, under the same names. Prints the retained part of each product.
void resize_lora(const std::string& from, const std::string& to, const ResizeKeys& keys);
/// Writes a file of any layout and kind of adapter for `model` in another layout. Throws invalid_config where the
/// layout has no place for its kind.
void convert_lora(const std::string& model, const std::string& from, const std::string& to, const LoraLayoutKeys& keys);
/// Prints rank, alpha, types, targets and metadata.
void print_lora(const std::string& file);

}  // namespace md
