// How many arrays one call of a CPU kernel takes.
#pragma once

#include <cstddef>

namespace md {

/// Arrays of each kind per kernel call. The compiler's analysis of results that share memory with operands is cubic in
/// this number: 400 cost 5 s, 50 nothing.
inline constexpr size_t kPerCall = 48;

}  // namespace md
