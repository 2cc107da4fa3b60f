#include "maxdiffusion/ops/registry.h"

#include "maxdiffusion/tiles/call.h"

namespace md {

const OpList& all_ops() {
  static const OpList list = [] {
    OpList all;
    for (auto family :
         {elementwise_ops, constant_ops, identity_ops, shape_ops, dot_ops, conv_ops, attention_ops, cudnn_attention_ops,
          reduce_ops, gather_ops, custom_call_ops, control_flow_ops, random_ops, sharding_ops, custom_vjp_ops})
      for (const OpDef* op : family()) all.push_back(op);
    all.push_back(&tiles::kTileProgram);
    return all;
  }();
  return list;
}

}  // namespace md
