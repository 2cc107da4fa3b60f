// How this process was started: alone, by an MPI launcher, or on the hosts of a TPU slice.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace md {

/// Rank and number of the processes that were started together.
struct Launch {
  int64_t rank = 0, count = 1;
  std::string by;           // source of this information; empty: a single process
  std::string coordinator;  // host of process 0; empty: from MPI
};

/// Reads the variables of MPICH's mpiexec and of srun --mpi=pmi2 (PMI_RANK, PMI_SIZE). Throws invalid_config if they
/// contradict each other, and under Open MPI's launcher, which is incompatible with this program's MPI library.
Launch launch_of(const std::function<const char*(const char*)>& variable);
Launch launch_of_environment();

}  // namespace md
