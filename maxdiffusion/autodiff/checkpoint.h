// Rematerialisation: what a region of the forward pass keeps for the backward pass.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/autodiff/grad.h"

namespace md {

/// ys = f(xs). On the way back, what the policy does not keep is computed again, behind an optimization barrier tied
/// to the arriving cotangent. Inputs of the region are always kept. An empty policy calls f as it is. The region is
/// of the innermost graph among xs (the body of a loop, when f is called in one). Regions nest.
std::vector<Tensor> checkpoint(const RematPolicy& policy, const GraphFn& f, const std::vector<Tensor>& xs);

/// Values by name (named_values.h) that a policy keeps on the device, and that it keeps in the host's memory.
struct RematNames {
  std::vector<std::string> saved, offloaded;
  bool operator==(const RematNames&) const = default;
};

/// By name; case does not matter. Throws invalid_config with the known names.
///   NONE                          keeps everything: the empty policy
///   FULL                          keeps nothing
///   MATMUL_WITHOUT_BATCH          keeps matrix products without batch axes: those of linear layers
///   OFFLOAD_MATMUL_WITHOUT_BATCH  offloads these
///   HIDDEN_STATE_WITH_OFFLOAD     offloads values named hidden_states, self_attn and cross_attn
///   FLUX_OPTIMIZED                keeps values named attn_output and lin1_norm_hidden_states
///   CUSTOM                        keeps and offloads `names`
/// A name on one result of an operation stands for all its results. What is offloaded waits in the host's memory and
/// comes back before the region is computed again; where the device's memory is the host's (CPU), it is kept.
RematPolicy remat_policy(const std::string& name, const RematNames& names = {});
bool remat_is_none(const std::string& name);

}  // namespace md
