// What started this process: alone, or as one of several by an MPI launcher.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace md {

/// Where a process stands among those that one launcher started.
struct Launch {
  int64_t rank = 0, count = 1;
  std::string by;  // the variable that says so; empty: no launcher
};

/// Reads the variables of MPICH's mpiexec and of srun --mpi=pmi2 (PMI_RANK, PMI_SIZE). Throws invalid_config where they
/// contradict each other, and under Open MPI's launcher, whose processes this program's MPI library cannot join.
Launch launch_of(const std::function<const char*(const char*)>& variable);
Launch launch_of_environment();

}  // namespace md
