// The table by which an operation chooses how it is done. Each operation with more than one way (attention, norms,
// convolution) keeps such a table; its last row, the composed operations, takes every call.
#pragma once

#include <cstddef>

#include "maxdiffusion/base/error.h"

namespace md {

/// One way to do an operation. `Call` holds the arguments: tensors (their shapes and element types, and through
/// graph().options() the platform and the mesh) and the operation's options.
template <class Call, class Result>
struct KernelRow {
  const char* name;                     // in logs
  const char* (*refuses)(const Call&);  // why this row cannot take the call; null: it can
  Result (*build)(const Call&);
};

/// Refuses no call: for last rows.
template <class Call>
const char* never(const Call&) {
  return nullptr;
}

/// The first row that takes the call.
template <class Call, class Result, size_t N>
const KernelRow<Call, Result>& kernel_for(const KernelRow<Call, Result> (&table)[N], const Call& call) {
  for (const auto& row : table)
    if (!row.refuses(call)) return row;
  fail(Code::internal, "'{}', the last row of its table, refuses a call", table[N - 1].name);
}

}  // namespace md
