#include "maxdiffusion/base/this_machine.h"

#include <sys/utsname.h>

#include <chrono>
#include <fstream>

namespace md {

std::string cpuinfo(const std::string& name) {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(name))
      if (const size_t colon = line.find(": "); colon != line.npos) return line.substr(colon + 2);
  return "";
}

std::string processor_name() {
  if (std::string name = cpuinfo("model name"); !name.empty()) return name;
  utsname kernel{};
  ::uname(&kernel);
  return kernel.machine;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace md
