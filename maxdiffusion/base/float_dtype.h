// Element types of computations, by name.
#pragma once

#include <string_view>

#include "maxdiffusion/base/dtype.h"

namespace md {

/// parse_dtype of a key's value. Throws invalid_config naming the key and the names of floats where it is none.
DType parse_float_dtype(std::string_view key, std::string_view name);

}  // namespace md
