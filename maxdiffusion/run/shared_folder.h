// Whether the processes of a run see one folder.
#pragma once

#include <string>

namespace md {

/// Called by all processes. Throws io, in all of them, where one does not find in `folder` what the leader writes
/// there: it names the process, and what may be done.
void check_shared(const std::string& folder);

}  // namespace md
