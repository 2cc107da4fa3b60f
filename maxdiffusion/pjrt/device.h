// Internal to pjrt/: reading a device's description.
#pragma once

#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {

Device describe(const PJRT_Api* api, PJRT_DeviceDescription* description);

}  // namespace md::pjrt
