// Whether all processes of a run see the same folder.
#pragma once

#include <string>

namespace md {

/// Called by all processes. Throws io in all of them if a process does not see the file that process 0 writes into
/// `folder`; the message names the process and what to try.
void check_shared(const std::string& folder);

}  // namespace md
