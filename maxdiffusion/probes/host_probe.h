// What a host has, and what limits its processes: processor, memory, disks, files, the hub's cache, MPI, other hosts.
#pragma once

#include <string>

#include "maxdiffusion/probes/finding.h"

namespace md {

Findings probe_system();     // program, kernel, C library
Findings probe_processor();  // in a child, since kernels are asked what they use
Findings probe_memory();
Findings probe_limits();  // open files, sizes of files, shared memory

/// A folder that is written to, and read.
struct FolderProbe {
  std::string name, folder;    // as messages call it; where it is, or is to be made
  std::string key;             // what names it: a key of the config, or a variable; for the cure
  int64_t wanted = 1LL << 30;  // free bytes, of which less is an error; ten times as much is well
  double seconds = 60;
};
/// In a child: a network's disk may hang.
Findings probe_folder(const FolderProbe& probe);
/// The hub's cache and whether there is a token.
Findings probe_hub(double seconds);
Findings probe_mpi(double seconds);
/// Whether process 0 of a slice of TPUs can be reached, by what the environment says of other hosts.
Findings probe_hosts();

/// What children do; see plugin_probe.h.
void show_processor();
void show_folder(const std::string& folder);
void show_mpi();

}  // namespace md
