#include "maxdiffusion/processes/launch.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

int64_t number(const char* name, std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(error == std::errc() && end == text.data() + text.size() && value >= 0, Code::invalid_config,
        "{} is '{}'; expected a number, as an MPI launcher sets it", name, text);
  return value;
}

}  // namespace

Launch launch_of(const std::function<const char*(const char*)>& variable) {
  Launch launch;
  const char* rank = variable("PMI_RANK");
  const char* size = variable("PMI_SIZE");
  if (rank != nullptr && size != nullptr) {
    launch = {number("PMI_RANK", rank), number("PMI_SIZE", size), "PMI_RANK", ""};
    check(launch.rank < launch.count, Code::invalid_config, "PMI_RANK is {}; expected less than PMI_SIZE = {}",
          launch.rank, launch.count);
    return launch;
  }
  if (const char* open = variable("OMPI_COMM_WORLD_SIZE"); open != nullptr && number("OMPI_COMM_WORLD_SIZE", open) > 1)
    throw Error(Code::invalid_config, fmt::format("Open MPI's launcher started {} processes; expected MPICH's", open))
        .note("try: mpiexec.mpich in place of this mpiexec");
  return launch;
}

Launch launch_of_environment() {
  return launch_of([](const char* name) { return std::getenv(name); });
}

}  // namespace md
