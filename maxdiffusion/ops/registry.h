// Every operation record, for the generic test and `inspect`. Explicit lists: linkers drop self-registering objects.
#pragma once

#include <vector>

#include "maxdiffusion/graph/op.h"

namespace md {

using OpList = std::vector<const OpDef*>;

const OpList& all_ops();

// One list per family, at the foot of the family's .cc.
OpList elementwise_ops();
OpList constant_ops();
OpList identity_ops();
OpList shape_ops();
OpList dot_ops();
OpList conv_ops();
OpList attention_ops();
OpList cudnn_attention_ops();
OpList reduce_ops();
OpList gather_ops();
OpList custom_call_ops();
OpList control_flow_ops();
OpList random_ops();
OpList sharding_ops();
OpList custom_vjp_ops();

}  // namespace md
