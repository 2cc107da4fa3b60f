// What started this process: alone, or as one of several, by an MPI launcher or on the hosts of a slice of TPUs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace md {

/// Where a process stands among those that were started together.
struct Launch {
  int64_t rank = 0, count = 1;
  std::string by;           // what says so; empty: nothing, it is alone
  std::string coordinator;  // the host of process 0; empty: MPI knows
};

/// Reads the variables of MPICH's mpiexec and of srun --mpi=pmi2 (PMI_RANK, PMI_SIZE). Throws invalid_config where they
/// contradict each other, and under Open MPI's launcher, whose processes this program's MPI library cannot join.
Launch launch_of(const std::function<const char*(const char*)>& variable);
Launch launch_of_environment();

}  // namespace md
