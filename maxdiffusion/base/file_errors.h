// Errors of files: what to try about each cause, and whether a cause is this process or what the files hold.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "maxdiffusion/base/error.h"

namespace md {

/// "`act` 'PATH': Permission denied", of code io, with notes that say what to try about this `error`, an errno.
Error io_error(std::string_view act, const std::string& path, int error);
/// The error of the first file or folder in `folder` that is there but that this process may not open, for its
/// permissions or a limit on open files. None: it can open all, or there is no such folder.
std::optional<Error> unreadable_in(const std::string& folder);

}  // namespace md
