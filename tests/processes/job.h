// Commands that MPICH's launcher starts several times.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {

struct JobResult {
  int status = -1;     // of the launcher
  std::string output;  // of all processes
};

inline std::string launcher(int processes) {
  return "mpiexec.mpich -n " + std::to_string(processes) + " -disable-auto-cleanup ";
}

inline JobResult run_job(int processes, const std::string& command) {
  TemporaryFolder folder;
  const std::string log = folder / "log";
  const int raw = std::system((launcher(processes) + command + " >" + log + " 2>&1 </dev/null").c_str());
  return {WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw), read_file(log)};
}

}  // namespace md
