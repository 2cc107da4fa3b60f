#include "maxdiffusion/data/arrow_part.h"

#include <dlfcn.h>

#include "maxdiffusion/base/error.h"

namespace md {

const ArrowPart& arrow_part() {
  static const ArrowPart& part = []() -> const ArrowPart& {
    void* library = ::dlopen(MD_ARROW_PART, RTLD_NOW | RTLD_LOCAL);
    check(library != nullptr, Code::io, "Parquet and Arrow files need {}: {}", MD_ARROW_PART,
          library ? "" : ::dlerror());
    using Make = const ArrowPart* (*)();
    const auto make = reinterpret_cast<Make>(::dlsym(library, "md_arrow_part"));
    check(make != nullptr, Code::internal, "{} has no md_arrow_part", MD_ARROW_PART);
    return *make();
  }();
  return part;
}

}  // namespace md
