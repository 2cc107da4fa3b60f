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
    v("rank", rank, "of the matrices of linear layers");
    v("conv_rank", conv_rank, "of convolutions that see more than a point; 0: they are left out");
    v("layout", layout, "whose names; empty: what the model's other programs read",
      one_of_or_empty({"kohya", "comfyui", "diffusers"}));
    v("dtype", dtype, "type that is written: float32, bfloat16, float16");
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
    v("rank", rank, "the most that a pair has; null: as many as energy asks for");
    v("energy", energy, "part of the sum of squares of each product that is kept");
    v("dtype", dtype, "type that is written: float32, bfloat16, float16; empty: each as it is");
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
