// Decoding of large latents in overlapping tiles, so that the memory needed depends on a tile's size and not on the
// image's. Layout and linear blending are those of diffusers' AutoencoderKL.tiled_decode, and so are the results.
#pragma once

#include <functional>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// latents: f32 [N, h, w, C], split into squares of side `tile` (smaller at the right and lower edge), which overlap
/// their neighbours by a quarter. `decode`: f32 [N, a, b, C] → f32 [N, a·scale, b·scale, 3], called once per tile, with
/// tiles of equal size in succession. Returns f32 [N, h·scale, w·scale, 3].
HostArray decode_in_tiles(const HostArray& latents, int64_t tile, int64_t scale,
                          const std::function<HostArray(const HostArray&)>& decode);

}  // namespace md
