// Order of the devices of one slice. On a torus (TPU) mesh axes are laid along physical axes, the innermost first, so
// that neighbours in the mesh are neighbours on the wires; elsewhere it is id order.
#pragma once

#include <cstdint>
#include <vector>

#include "maxdiffusion/mesh/mesh.h"

namespace md {

/// Device ids in mesh order for `sizes` (slowest axis first, product = number of devices). `devices` are in id order.
/// Each mesh axis takes whole physical axes; with `split`, factors of a physical axis too. Where no such assignment
/// exists, or devices have no coordinates forming a full grid: id order.
std::vector<int> torus_order(const std::vector<DeviceInfo>& devices, const std::vector<int64_t>& sizes, bool split);

}  // namespace md
