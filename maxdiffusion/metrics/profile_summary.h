// What a profile says in a few numbers: which kernels take the time, how long the device idles between them, and what a
// step costs the host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

struct ProfileSummary {
  struct Kernel {
    std::string name;
    int64_t calls = 0;
    double seconds = 0;  // of all calls, without those of kernels within them
  };
  bool of_device = false;       // the kernels are those of the first device; false: of the host's threads
  std::vector<Kernel> kernels;  // by their seconds, the most first
  double busy = 0, span = 0;    // seconds in kernels, and from the first one's start to the last one's end
  double longest_gap = 0;       // seconds in which no kernel ran, between two
  int64_t steps = 0;
  double step = 0;    // median seconds from the start of a step to that of the next one
  double host = 0;    // median seconds that the host's thread has for a step, without what it waits for
  double waited = 0;  // median seconds of a step in which it waits
};
/// Of an .xplane.pb file (profile.h). Throws io where it is none.
ProfileSummary summarize_profile(const std::string& file);

}  // namespace md
