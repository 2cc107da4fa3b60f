// Floating-point element types by name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/dtype.h"

namespace md {

/// parse_dtype of a key's value. Throws invalid_config naming the key, with the float types, for other names. `known`:
/// other values that the key has, for the message.
DType parse_float_dtype(std::string_view key, std::string_view name, std::vector<std::string> known = {});

}  // namespace md
