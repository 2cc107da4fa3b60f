// For tests only: the error that a call throws.
#pragma once

#include "maxdiffusion/base/error.h"

namespace md {

/// What act() throws; Code::internal if it throws no Error.
Error error_of(auto&& act) {
  try {
    act();
  } catch (const Error& e) {
    return e;
  }
  return Error(Code::internal, "nothing was thrown");
}

}  // namespace md
