// Convolution in one to three spatial dimensions.
#pragma once

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/dot.h"

namespace md {

struct ConvOptions {
  Dims stride = {};                  // per spatial axis; empty: 1
  Dims pad_low = {}, pad_high = {};  // zeros before and after; empty: 0
  Dims lhs_dilation = {};            // zeros inserted between input elements (transposed convolution)
  Dims rhs_dilation = {};            // kernel dilation
  int64_t groups = 1;
  Precision precision = Precision::default_;
  LogicalAxes axes =
      {};  // logical axes of the result, of which batch and channels may be sharded; empty: kernels on one device only
  bool operator==(const ConvOptions&) const = default;
};

/// x: [B, spatial…, Ci] (channels last)   w: [Co, Ci/groups, k…] (PyTorch's layout)   y: [B, spatial…, Co], of sum_type
/// (ops/dot.h). y's spatial size: floor((dilated x + pads − dilated k) / stride) + 1. Gradient in x and w.
Tensor conv(Tensor x, Tensor w, ConvOptions options = {});

}  // namespace md
