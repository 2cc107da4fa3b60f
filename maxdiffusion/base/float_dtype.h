// Floating-point element types by name.
#pragma once

#include <string_view>

#include "maxdiffusion/base/dtype.h"

namespace md {

/// parse_dtype of a key's value. Throws invalid_config naming the key, with the float types, for other names.
DType parse_float_dtype(std::string_view key, std::string_view name);

}  // namespace md
