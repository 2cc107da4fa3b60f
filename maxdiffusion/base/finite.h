// Search for NaN and infinity.
#pragma once

#include <cstdint>
#include <optional>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Row-major index of the first NaN or infinity; none if all are finite, as in integer arrays.
std::optional<int64_t> first_not_finite(const HostArray& array);

}  // namespace md
