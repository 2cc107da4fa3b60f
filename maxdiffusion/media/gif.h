// Clips as animated GIF: what shows them where videos cannot be shown.
#pragma once

#include <string>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// frames: u8 [F, H, W, 3] → the bytes of a GIF file that repeats for ever, `fps` rounded to hundredths of a second for
/// each frame. All frames share 256 colours at most: their own where there are no more, otherwise chosen by median cut
/// (Heckbert 1982). Throws internal for no frames or sides above 65535. Source: GIF89a specification, CompuServe 1990.
std::string encode_gif(const HostArray& frames, double fps);

}  // namespace md
