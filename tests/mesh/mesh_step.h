// One training step of a small UNet like SDXL's, or of a small transformer like Wan's, Flux's, Z-Image's or
// Qwen-Image's, on any mesh of virtual CPU devices.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct MeshRun {
  double loss = 0;   // of the last step
  HostArrays state;  // parameters and moments after the last step, by input name
  std::map<std::string, int64_t> bytes_per_device, bytes;
  std::vector<CollectiveSum> collectives;
};

enum class MeshModel { unet, wan, flux, flux2, z_image, qwen_image };
/// Runs `steps` updates from the same initial values on the same batch. `attention`: the value of that key. `windows`:
/// convolution weights have the memory layout of a TPU.
MeshRun run_on(const Devices& devices, const AxisRules& rules, int steps, MeshModel model = MeshModel::unet,
               const std::string& attention = "dot_product", bool windows = false, int64_t batch = 8);

}  // namespace md
