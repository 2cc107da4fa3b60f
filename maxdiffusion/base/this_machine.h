// The processor's name and the time of day.
#pragma once

#include <string>

namespace md {

/// The value of the first line of /proc/cpuinfo that begins with `name`, or "".
std::string cpuinfo(const std::string& name);
/// The processor's name, else the architecture (as on ARM64).
std::string processor_name();
/// Seconds since 1970.
double seconds_since_1970();

}  // namespace md
