// Decoding of large latents in tiles that overlap, so that the memory needed depends on a tile's size and not on the
// image's. Layout and linear blending are those of diffusers' AutoencoderKL.tiled_decode, so the images agree.
#pragma once

#include <functional>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// latents: f32 [N, h, w, C], cut into squares of `tile` (at the right and lower edge what is left), a quarter of which
/// overlaps the next. `decode`: f32 [N, a, b, C] → f32 [N, a·scale, b·scale, 3], called once per tile, tiles of one
/// size following each other. → f32 [N, h·scale, w·scale, 3].
HostArray decode_in_tiles(const HostArray& latents, int64_t tile, int64_t scale,
                          const std::function<HostArray(const HostArray&)>& decode);

}  // namespace md
