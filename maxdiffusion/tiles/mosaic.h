// A tile program as a kernel for TPUs: the text of a Mosaic module, and the call that libtpu compiles. Blocks are
// copied between the TPU's memories by the compiler, ahead of the steps that need them. Source: the form of the calls
// and of the modules that JAX 0.11 writes (its version 15 of the dialect).
#pragma once

#include <string>

#include "maxdiffusion/graph/statements.h"
#include "maxdiffusion/tiles/program.h"

namespace md::tiles {

inline constexpr const char* kTpuCall = "tpu_custom_call";

/// The module's text.
std::string mosaic_text(const Program& program);
/// The call, with operands and results as print_stablehlo has them.
CustomCall mosaic_call(const Program& program);

}  // namespace md::tiles
