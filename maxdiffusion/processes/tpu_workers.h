// The hosts of a slice of TPUs, of which each runs the same command: their number and order come from the platform.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "maxdiffusion/processes/launch.h"

namespace md {

/// Where process 0 of TPUs listens.
inline constexpr int kTpuPort = 8477;

/// The worker that this host is. `variable`: the environment's TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, as Kubernetes
/// has them; `metadata`: attributes of the machine by Google's server, agent-worker-number and
/// worker-network-endpoints ("…:…:10.0.0.2,…"). Of several slices there are MEGASCALE_SLICE_ID, MEGASCALE_NUM_SLICES
/// and MEGASCALE_COORDINATOR_ADDRESS besides, in either place (tpu-env holds them there, as lines "NAME: 'value'").
/// Alone where neither says anything. Throws invalid_config where they contradict each other.
Launch tpu_worker_of(const std::function<const char*(const char*)>& variable,
                     const std::function<std::optional<std::string>(const std::string&)>& metadata);
/// Asks the environment, then the server (GCE_METADATA_HOST or metadata.google.internal), which must answer within a
/// second.
Launch tpu_worker_of_machine();

/// An attribute of this machine by the metadata server at `host`, perhaps with ":port". Nothing where it does not
/// answer or has none.
std::optional<std::string> google_metadata(const std::string& host, const std::string& attribute);

}  // namespace md
