// Clips as animated GIF.
#pragma once

#include <string>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// frames: u8 [F, H, W, 3] → the bytes of a GIF file that loops, `fps` rounded to hundredths of a second for each
/// frame. All frames share at most 256 colours: the exact ones if there are no more, else chosen by median cut
/// (Heckbert 1982). Throws internal for no frames or sides above 65535. Source: GIF89a specification, CompuServe 1990.
std::string encode_gif(const HostArray& frames, double fps);

}  // namespace md
