#include "maxdiffusion/data/records/arrow_library.h"

#include "maxdiffusion/base/shared_library.h"

namespace md {

const ArrowLibrary& arrow_library() {
  static const auto& library =
      open_library<const ArrowLibrary>("md_arrow.so", "md_arrow_library", "Parquet and Arrow files");
  return library;
}

}  // namespace md
