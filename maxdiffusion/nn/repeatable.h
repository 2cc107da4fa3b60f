// Models that are traced more than once in one graph.
#pragma once

#include "maxdiffusion/nn/scope.h"

namespace md {

/// A scope like `s` whose parameters may be traced again: each is the same tensor then.
Scope repeatable(const Scope& s);

}  // namespace md
