// The version of this library and its program, from the project() line of CMakeLists.txt.
#pragma once

namespace md {

/// "0.5.0".
const char* version();

}  // namespace md
