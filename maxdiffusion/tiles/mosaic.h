// A tile program as a kernel for TPUs: the text of a Mosaic module, and the call that libtpu compiles. The compiler
// copies blocks between the TPU's memories ahead of the steps that need them. Source: calls and modules that JAX 0.11
// writes (version 15 of the dialect).
#pragma once

#include <string>

#include "maxdiffusion/graph/statements.h"
#include "maxdiffusion/tiles/program.h"

namespace md::tiles {

inline constexpr const char* kTpuCall = "tpu_custom_call";

/// The module's text.
std::string mosaic_text(const Program& program);
/// The call, with the operands and results of print_stablehlo.
CustomCall mosaic_call(const Program& program);

}  // namespace md::tiles
