// Rematerialization: which values of a region the forward pass stores for the backward pass.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/autodiff/grad.h"

namespace md {

/// ys = f(xs). The backward pass recomputes what the policy does not store, behind an optimization barrier with the
/// incoming cotangent. Inputs of the region are always stored. An empty policy just calls f. The region belongs to the
/// innermost graph among xs (the body of a loop, if f is called in one). Regions nest.
std::vector<Tensor> checkpoint(const RematPolicy& policy, const GraphFn& f, const std::vector<Tensor>& xs);

/// Names (named_values.h) of values that a policy stores on the device, and of those that it offloads.
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
/// A name on one result of an operation applies to all its results. Offloaded values are copied to the host's memory
/// and back before the region is recomputed; on CPUs they are stored.
RematPolicy remat_policy(const std::string& name, const RematNames& names = {});

}  // namespace md
