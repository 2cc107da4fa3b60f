// Starts a command several times with MPICH's launcher.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {

struct JobResult {
  int status = -1;            // of the launcher
  std::vector<int> statuses;  // of the processes, by rank
  std::string output;         // of all processes
};

/// The launcher does not stop the other processes when one dies, so the test sees whether they end on their own. Each
/// process writes to a file, because the launcher forwards little output after a death.
inline JobResult run_job(int processes, const std::string& command) {
  const TemporaryFolder folder;
  const std::string log = folder / "log", status = folder / "status.", script = folder / "job.sh";
  write_file_atomic(log, "");
  // Hydra signals a death to the others by SIGUSR1, which would kill the shell. LeakSanitizer itself crashes at the end
  // of a process with an error while MPI's threads run.
  write_file_atomic(script, "trap '' USR1\nexport ASAN_OPTIONS=\"$ASAN_OPTIONS:detect_leaks=0\"\n" + command + " >>" +
                                log + " 2>&1 </dev/null\ns=$?\necho $s >" + status + "$PMI_RANK\nexit $s\n");
  const int raw = std::system(("mpiexec.mpich -n " + std::to_string(processes) + " -disable-auto-cleanup sh " + script +
                               " >>" + log + " 2>&1 </dev/null")
                                  .c_str());
  JobResult out{WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw), {}, read_file(log)};
  for (int rank = 0; rank < processes; ++rank) {
    const std::string file = status + std::to_string(rank);
    out.statuses.push_back(exists(file) ? std::stoi(read_file(file)) : -1);
  }
  return out;
}

}  // namespace md
