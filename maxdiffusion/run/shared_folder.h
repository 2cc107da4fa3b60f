// Whether the processes of a run see one folder.
#pragma once

#include <string>

namespace md {

/// Called by all processes. Throws io, in all of them, where one does not see in `folder` the file that process 0
/// writes: it names the process, and what to try.
void check_shared(const std::string& folder);

}  // namespace md
