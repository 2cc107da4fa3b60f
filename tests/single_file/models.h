// Tiny models of three kinds as folders, and the same in one file of the original layout, built by the recorded table
// of names (tools/golden/single_files.py) and not by the library's own.
#pragma once

#include <string>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Writes the model folder `which` ("sd", "sd2", "sdxl") into `folder`, with weights in f32.
void write_folder(const std::string& which, const std::string& folder);
/// "unet/conv_in.weight" → the array, of every component of a folder.
HostArrays weights_of_folder(const std::string& folder);
/// The tensors of the single file of such a folder.
HostArrays original_of_folder(const std::string& which, const std::string& folder);

}  // namespace md
