// Short spellings for the `samples` field of operation records. Samples are f64, so that the generic test can compare
// gradients with finite differences to many digits.
#pragma once

#include "maxdiffusion/graph/op.h"

namespace md {

inline Shape f64(Dims dims) { return {DType::f64, std::move(dims)}; }
inline Shape s32(Dims dims) { return {DType::s32, std::move(dims)}; }
inline Shape s8(Dims dims) { return {DType::s8, std::move(dims)}; }
inline Shape pred(Dims dims) { return {DType::pred, std::move(dims)}; }

}  // namespace md
