// A tile program as a kernel for NVIDIA GPUs: the text of a Triton module, and the call that the GPU plugin compiles.
// A step of the parallel axes of the grid is one program of the kernel's grid; steps of sequential axes are a loop in
// it, and scratch memory is what the loop carries in registers. Source: the Triton dialect as XLA's plugin for CUDA
// reads it (`__gpu$xla.gpu.triton`).
#pragma once

#include <string>

#include "maxdiffusion/graph/statements.h"
#include "maxdiffusion/tiles/program.h"

namespace md::tiles {

inline constexpr const char* kTritonCall = "__gpu$xla.gpu.triton";

/// The module's text. Throws invalid_graph, with the kernel's name and the operation, for what Triton has no form of:
/// tiles whose sizes are no powers of two, some rows of scratch memory, products with a size below 16.
std::string triton_text(const Program& program);
/// The call, with the operands and results of print_stablehlo.
CustomCall triton_call(const Program& program);

}  // namespace md::tiles
