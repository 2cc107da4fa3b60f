// The hosts of a TPU slice, each running the same command; the platform provides their number and order.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "maxdiffusion/processes/launch.h"

namespace md {

/// Port of process 0 on TPUs.
inline constexpr int kTpuPort = 8477;

/// The worker index of this host, and the number of workers. `variable`: the environment's TPU_WORKER_ID and
/// TPU_WORKER_HOSTNAMES, as Kubernetes has them; `metadata`: attributes of the machine by Google's server,
/// agent-worker-number and worker-network-endpoints ("…:…:10.0.0.2,…"). With several slices also MEGASCALE_SLICE_ID,
/// MEGASCALE_NUM_SLICES and MEGASCALE_COORDINATOR_ADDRESS, in either place (there in tpu-env, as lines "NAME:
/// 'value'"). A single process if neither is set. Throws invalid_config if they contradict each other.
Launch tpu_worker_of(const std::function<const char*(const char*)>& variable,
                     const std::function<std::optional<std::string>(const std::string&)>& metadata);
/// Reads the environment, then the metadata server (GCE_METADATA_HOST or metadata.google.internal; timeout 1 s).
Launch tpu_worker_of_machine();

/// An attribute of this machine from the metadata server at `host` ("host" or "host:port"). None if it does not answer
/// or lacks the attribute.
std::optional<std::string> google_metadata(const std::string& host, const std::string& attribute);

}  // namespace md
