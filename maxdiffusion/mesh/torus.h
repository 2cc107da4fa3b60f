// Order of the devices of one slice. On a torus (TPU) mesh axes are mapped to physical axes, the innermost first, so
// that neighbours in the mesh are physical neighbours; elsewhere: id order.
#pragma once

#include <cstdint>
#include <vector>

#include "maxdiffusion/mesh/mesh.h"

namespace md {

/// Device ids in mesh order for `sizes` (slowest axis first, product = number of devices). `devices` are in id order. A
/// mesh axis consists of whole physical axes; with `split`, also of factors of one. If there is no such assignment, or
/// the coordinates form no full grid: id order.
std::vector<int> torus_order(const std::vector<DeviceInfo>& devices, const std::vector<int64_t>& sizes, bool split);

}  // namespace md
