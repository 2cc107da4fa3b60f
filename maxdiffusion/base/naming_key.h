// Errors of a file that name the key that names the file.
#pragma once

#include <fmt/format.h>

#include "maxdiffusion/base/error.h"

namespace md {

/// The result of read(); a note on its errors names `key`.
template <class F>
auto naming_key(const char* key, F&& read) try {
  return read();
} catch (Error& e) {
  throw e.note(fmt::format("in the key {}", key));
}

}  // namespace md
