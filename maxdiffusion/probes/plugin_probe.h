// Whether a plugin opens, lists its devices and computes correctly, and whether its driver is new enough.
#pragma once

#include <string>

#include "maxdiffusion/probes/finding.h"

namespace md {

struct PluginProbe {
  std::string hardware = "cpu", plugin;  // as in the config
  bool required = true;                  // a missing device or plugin is an error
  double seconds = 60;                   // time limit of the plugin
  std::string root;                      // prefix of /dev and /proc, for tests
};
/// Opens the plugin in a child process.
Findings probe_plugin(const PluginProbe& probe);
/// NVIDIA's driver, peer access between GPUs, NCCL. Empty without a GPU.
Findings probe_gpu_driver(const PluginProbe& probe);
/// "580.82.07" from the text of /proc/driver/nvidia/version; empty if it has no version.
std::string driver_version(const std::string& text);
/// The oldest major version of NVIDIA's driver for a plugin with this path, from the CUDA version in its name; 0 if it
/// has none.
int wanted_driver(const std::string& plugin);
/// Whether the plugin supports a driver of this version.
Finding check_driver(const std::string& version, const std::string& plugin);

/// Run in child processes: print one JSON object per line, each before a step that may hang or abort.
void show_plugin(const std::string& hardware, const std::string& plugin);
void show_gpu_driver(const std::string& plugin);

}  // namespace md
