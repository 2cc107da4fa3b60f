// Probes of a host and of the limits of its processes: processor, memory, disks, files, the hub's cache, MPI, other
// hosts.
#pragma once

#include <string>

#include "maxdiffusion/probes/finding.h"

namespace md {

Findings probe_system();     // program, kernel, C library
Findings probe_processor();  // in a child process: it calls the kernels
Findings probe_memory();
Findings probe_limits();  // open files, sizes of files, shared memory

/// Test of a folder by writing and reading.
struct FolderProbe {
  std::string name, folder;            // name for messages; path, which may not exist yet
  std::string key;                     // the key or variable that sets it, for the cure
  int64_t required_bytes = 1LL << 30;  // free bytes: less is an error, less than ten times as much a warning
  double seconds = 60;
};
/// Runs in a child process, because a network file system may hang.
Findings probe_folder(const FolderProbe& probe);
/// The hub's cache, and whether there is an access token.
Findings probe_hub(double seconds);
Findings probe_mpi(double seconds);
/// Whether process 0 of a TPU slice is reachable, at the address in the environment.
Findings probe_hosts();

/// Run in child processes; see plugin_probe.h.
void show_processor();
void show_folder(const std::string& folder);
void show_mpi();

}  // namespace md
