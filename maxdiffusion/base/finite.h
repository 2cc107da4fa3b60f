// Numbers that are not finite, found at the speed of memory.
#pragma once

#include <cstdint>
#include <optional>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// The place (row-major) of the first infinity or NaN; none where there is none, as in arrays of whole numbers.
std::optional<int64_t> first_not_finite(const HostArray& array);

}  // namespace md
