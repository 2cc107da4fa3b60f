// Families of the reference's configuration files that are not here.
#pragma once

#include <vector>

namespace md {

/// What tells a file of such a family: a key, and how its value begins.
struct MissingFamily {
  const char *name, *key, *value = "";
};
const std::vector<MissingFamily>& missing_families();

/// Those that are here, as messages name them.
extern const char* const kFamiliesHere;

}  // namespace md
