// Exit status of each error code.
#pragma once

#include "maxdiffusion/base/error.h"

namespace md {

inline int exit_status(Code code) {
  switch (code) {
    case Code::invalid_config: return 2;
    case Code::invalid_graph: return 3;
    case Code::io: return 4;
    case Code::device: return 5;
    case Code::out_of_memory: return 6;
    case Code::internal: return 70;
  }
  return 70;
}

}  // namespace md
