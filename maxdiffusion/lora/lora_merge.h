// LoRA matrices added to weights in host memory, so that the model runs as fast as without them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/lora/lora_file.h"
#include "maxdiffusion/nn/param.h"

namespace md {

struct ScaledLora {
  LoraFile file;
  double scale = 1;
};

/// What LoRA files add to a model's weights: W + Σ scale · alpha/r · up·down for every weight that a file has matrices
/// for, and W + Σ scale · difference. Sums are f32 and rounded once to the storage type; of a weight of any size a few
/// MB a core are in f32 at a time. Uses all cores.
class LoraSums {
 public:
  /// Components that `params` does not hold are skipped. Throws io where a target is missing or a shape differs (naming
  /// both). `loras` must live as long as this.
  LoraSums(const std::vector<ScaledLora>& loras, const ParamTable& params);
  /// `value` of the weight of a published path, in a new array where a file changes it.
  HostArray added(const std::string& component, const std::string& path, const HostArray& value) const;

 private:
  friend void merge_loras(const std::vector<ScaledLora>&, const ParamTable&, HostArrays&);
  struct Addend {          // one product, or one whole array
    const LoraPair* pair;  // null: `whole` is added
    const HostArray* whole;
    double factor;
  };
  using Addends = std::vector<Addend>;
  /// Some rows of one weight: what of `from` they are becomes theirs in `to`.
  struct Rows;
  static void cut(const Addends& addends, const Dims& dims, DType type, const std::byte* from, std::byte* to,
                  std::vector<Rows>& out);
  static void add(const std::vector<Rows>& all);

  std::map<std::string, std::map<std::string, Addends>> addends_;  // component → published path
};

/// The sums of all weights. `values`: host arrays by input name ("unet/conv_in.weight"), stacked or not, as
/// ModelWeights::read gives them; entries that change become new arrays, so memory that they shared is not written.
/// Throws as LoraSums does; nothing is changed then.
void merge_loras(const std::vector<ScaledLora>& loras, const ParamTable& params, HostArrays& values);

}  // namespace md
