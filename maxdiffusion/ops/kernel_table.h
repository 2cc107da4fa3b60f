// Kernel selection. Each operation with several implementations (attention, norms, convolution) has a table; its last
// row, composed operations, supports every call.
#pragma once

#include <cstddef>

#include "maxdiffusion/base/error.h"

namespace md {

/// One implementation of an operation. `Call` holds the arguments: tensors (their shapes and element types, and through
/// graph().options() the platform and the mesh) and the operation's options.
template <class Call, class Result>
struct KernelRow {
  const char* name;                     // in logs
  const char* (*refuses)(const Call&);  // why this row does not support the call; null if it does
  Result (*build)(const Call&);
};

/// For last rows, which support every call.
template <class Call>
const char* never(const Call&) {
  return nullptr;
}

/// The first row that supports the call.
template <class Call, class Result, size_t N>
const KernelRow<Call, Result>& kernel_for(const KernelRow<Call, Result> (&table)[N], const Call& call) {
  for (const auto& row : table)
    if (!row.refuses(call)) return row;
  fail(Code::internal, "'{}', the last row of its table, refuses a call", table[N - 1].name);
}

}  // namespace md
