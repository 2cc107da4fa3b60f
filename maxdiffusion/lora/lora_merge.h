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

/// W + Σ scale · alpha/r · up·down for every weight that a file has matrices for, and W + Σ scale · difference.
/// `values`: host arrays by input name
/// ("unet/conv_in.weight"), stacked or not, as ModelWeights::read gives them; entries that change become new arrays, so
/// memory that they shared is not written. Sums are f32 and rounded once to the storage type. Components that `params`
/// does not hold are skipped. Uses all cores. Throws io where a target is missing or a shape differs (naming both);
/// nothing is changed then.
void merge_loras(const std::vector<ScaledLora>& loras, const ParamTable& params, HostArrays& values);

}  // namespace md
