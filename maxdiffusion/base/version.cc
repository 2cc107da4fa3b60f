#include "maxdiffusion/base/version.h"

namespace md {

const char* version() { return MD_VERSION; }

}  // namespace md
