// Rematerialisation: what a region of the forward pass keeps for the backward pass.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/autodiff/grad.h"

namespace md {

enum class Keep { keep, offload, recompute };
/// Decides per node of a region. Must be pure.
using RematPolicy = std::function<Keep(const Node&)>;

/// ys = f(xs). On the way back, what the policy does not keep is computed again, behind an optimization barrier tied
/// to the arriving cotangent. Inputs of the region are always kept.
std::vector<Tensor> checkpoint(const RematPolicy& policy, const GraphFn& f, const std::vector<Tensor>& xs);

/// "NONE" (keep everything: f is called as it is), "FULL" (keep nothing). Throws invalid_config with the known names.
RematPolicy remat_policy(const std::string& name);
bool remat_is_none(const std::string& name);

}  // namespace md
