// Merging of LoRA matrices into weights in host memory.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/step_range.h"
#include "maxdiffusion/lora/lora_file.h"
#include "maxdiffusion/nn/param.h"

namespace md {

struct ScaledLora {
  LoraFile file;
  double scale = 1;
  /// In place of `scale` for these weights: component → published path.
  std::map<std::string, std::map<std::string, double>> scales = {};
  StepRange steps = {};  // of the denoiser's; text encoders run once

  double scale_of(const std::string& component, const std::string& path) const;
};
/// Which of several LoRA files are left out; empty: none.
using LeftOut = std::vector<bool>;

/// Merged weights: W + Σ scale · alpha/r · up·down + Σ scale · difference + Σ scale · (W' − W) of adapters of other
/// kinds, where W' is what each alone makes of W, so that their order does not matter. Sums are f32 and rounded once to
/// the storage type, with a few MB of f32 per core. Uses all cores.
class LoraSums {
 public:
  /// Skips weights that are not in `params`. Throws io if a shape differs (naming both). `loras` must outlive this.
  LoraSums(const std::vector<ScaledLora>& loras, const ParamTable& params, const LeftOut& left_out = {});
  /// The merged value of the weight with this published path; a new array if a file changes it.
  HostArray added(const std::string& component, const std::string& path, const HostArray& value) const;

 private:
  friend void merge_loras(const std::vector<ScaledLora>&, const ParamTable&, HostArrays&, const LeftOut&);
  struct Addend {          // one product, one full-rank difference, or one adapter
    const LoraPair* pair;  // null: one of the others
    const HostArray* whole;
    const AdapterWeights* adapter;  // or of another kind
    double factor;
  };
  using Addends = std::vector<Addend>;
  /// Some rows of one weight, read from `from` and written to `to`.
  struct Rows;
  static void cut(const Addends& addends, const Dims& dims, DType type, const std::byte* from, std::byte* to,
                  std::vector<Rows>& out);
  static void add(const std::vector<Rows>& all);

  std::map<std::string, std::map<std::string, Addends>> addends_;  // component → published path
};

/// Merges all weights. `values`: host arrays by input name ("unet/conv_in.weight"), stacked or not, from
/// ModelWeights::read; changed entries become new arrays, so shared memory is not written. Throws as LoraSums, without
/// changes.
void merge_loras(const std::vector<ScaledLora>& loras, const ParamTable& params, HostArrays& values,
                 const LeftOut& left_out = {});

}  // namespace md
