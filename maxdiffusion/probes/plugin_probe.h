// Whether a plugin opens, shows its devices and computes right, and whether the driver below it is what it wants.
#pragma once

#include <string>

#include "maxdiffusion/probes/finding.h"

namespace md {

struct PluginProbe {
  std::string hardware = "cpu", plugin;  // as in the config
  bool required = true;                  // what is missing is an error, even where there is no such device
  double seconds = 60;                   // that the plugin may take
  std::string root;                      // what /dev and /proc are below; empty but in tests
};
/// The plugin is opened in a child process.
Findings probe_plugin(const PluginProbe& probe);
/// NVIDIA's driver, whether GPUs reach each other's memory, NCCL. Nothing where there is no GPU.
Findings probe_gpu_driver(const PluginProbe& probe);
/// "580.82.07" of the text of /proc/driver/nvidia/version; empty: it says none.
std::string driver_version(const std::string& text);
/// The least major number of NVIDIA's driver for a plugin of this path, by the CUDA version in its name; 0: it has
/// none.
int wanted_driver(const std::string& plugin);
/// Whether a driver of this version is one that the plugin takes.
Finding judge_driver(const std::string& version, const std::string& plugin);

/// What children do: print what they find, a JSON object a line, each before what may hang or abort.
void show_plugin(const std::string& hardware, const std::string& plugin);
void show_gpu_driver(const std::string& plugin);

}  // namespace md
