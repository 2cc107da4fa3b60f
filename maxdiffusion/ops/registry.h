// Every operation record, for the generic test and `inspect`. Explicit lists: linkers drop self-registering objects.
#pragma once

#include <vector>

#include "maxdiffusion/graph/op.h"

namespace md {

const std::vector<const OpDef*>& all_ops();

}  // namespace md
