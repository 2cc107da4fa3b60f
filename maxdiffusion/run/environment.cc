#include "maxdiffusion/run/environment.h"

#include <sys/utsname.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/this_machine.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/processes/rendezvous.h"

namespace md {
void record_start(const RunInfo& run, const Devices& devices, double time) {
  if (!run.is_coordinator || !run.metrics.write_metrics) return;
  utsname kernel{};
  ::uname(&kernel);
  const pjrt::Client& client = devices.client();
  const int first = devices.mesh().device_ids()[static_cast<size_t>(devices.local().front())];
  std::string plugin = client.platform_name();
  if (client.platform_version() != plugin) plugin += " " + client.platform_version();
  const nlohmann::ordered_json line = {
      {"time", std::round(time * 1000) / 1000},
      {"version", version()},
      {"host", valid_utf8(host_name())},
      {"system", fmt::format("{} {} {}", kernel.sysname, kernel.release, kernel.machine)},
      {"processor", valid_utf8(processor_name())},
      {"memory_bytes", memory_limit()},
      {"plugin", valid_utf8(plugin)},
      {"device", valid_utf8(client.device(first).kind)},
      {"devices", devices.count()},
      {"mesh", devices.mesh().describe()},
      {"processes", processes().count()},
  };
  try {
    FileWriter file(run.folder + "/starts.jsonl", FileWriter::Open::append);
    const std::string text = line.dump() + "\n";
    file.write(text.data(), text.size());
    file.close();
  } catch (const Error& e) {
    log_warning("starts.jsonl is not written and training continues: {}", e.what());
  }
}

}  // namespace md
