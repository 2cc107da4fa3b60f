// Summary of a profile: which kernels take the time, how long the device idles between them, and how long the host
// needs for a step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

struct ProfileSummary {
  struct Kernel {
    std::string name;
    int64_t calls = 0;
    double seconds = 0;  // total of all calls, without nested kernels
  };
  bool of_device = false;       // whether kernels are those of the first device; false: of the host's threads
  std::vector<Kernel> kernels;  // sorted by seconds, longest first
  double busy = 0, span = 0;    // seconds in kernels, and from the first one's start to the last one's end
  double longest_gap = 0;       // longest time between two kernels, seconds
  int64_t steps = 0;
  double step = 0;    // median seconds from the start of a step to that of the next one
  double host = 0;    // median seconds of a step in which the host's thread works, without waiting
  double waited = 0;  // median seconds of a step in which it waits
};
/// Summarizes an .xplane.pb file (profile.h). Throws io if the file is not one.
ProfileSummary summarize_profile(const std::string& file);

}  // namespace md
