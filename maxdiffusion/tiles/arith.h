// Names that the printers of kernels share: operations of MLIR's dialect arith.
#pragma once

#include <string_view>

#include "maxdiffusion/tiles/program.h"

namespace md::tiles {

/// The operation of dialect arith for an operation of two values of one type: "arith.addf"; empty: there is none.
constexpr std::string_view arith_name(Op op, bool of_floats) {
  switch (op) {
    case Op::add: return of_floats ? "arith.addf" : "arith.addi";
    case Op::subtract: return of_floats ? "arith.subf" : "arith.subi";
    case Op::multiply: return of_floats ? "arith.mulf" : "arith.muli";
    case Op::divide: return of_floats ? "arith.divf" : "";
    case Op::maximum: return of_floats ? "arith.maximumf" : "arith.maxsi";
    case Op::minimum: return of_floats ? "arith.minimumf" : "arith.minsi";
    case Op::both: return of_floats ? "" : "arith.andi";
    default: return "";
  }
}

}  // namespace md::tiles
