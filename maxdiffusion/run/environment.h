// The environment of a run: starts.jsonl of its folder, one JSON object per start.
#pragma once

#include "maxdiffusion/run/model_components.h"
#include "maxdiffusion/settings/run_info.h"

namespace md {

/// Appends {"time": seconds since 1970, "version", "host", "system", "processor", "memory_bytes", "plugin", "device",
/// "devices", "mesh", "processes"} to starts.jsonl. Does nothing if the run writes no metrics, or in processes other
/// than the coordinator. Warns if the file cannot be written.
void record_start(const RunInfo& run, const Devices& devices, double time);

}  // namespace md
