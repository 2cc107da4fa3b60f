// Rows of arrays: axis 0, usually the batch.
#pragma once

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Rows [from, from + count); past the end the last row repeats.
HostArray rows(const HostArray& a, int64_t from, int64_t count);
/// Writes the rows of `part` into `whole` from row `from`; rows past the end are dropped.
void set_rows(HostArray& whole, int64_t from, const HostArray& part);
/// Every row `times` times in succession.
HostArray repeat_rows(const HostArray& a, int64_t times);
/// Without axis 0, which must be 1.
HostArray without_batch(const HostArray& a);
/// Zeros of the shape of `a`.
HostArray zeros_as(const HostArray& a);
/// f32 [N, C, H, W] → [N, H, W, C].
HostArray nchw_to_nhwc(const HostArray& a);
/// f32 [N, H, W, C] → [N, C, H, W].
HostArray nhwc_to_nchw(const HostArray& a);

}  // namespace md
