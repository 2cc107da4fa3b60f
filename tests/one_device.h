// One CPU device for tests that run graphs, opened once per process.
#pragma once

#include "maxdiffusion/runtime/runtime.h"

namespace md {

inline const Devices& one_device() {
  static const Devices devices = Devices::open();
  return devices;
}

}  // namespace md
