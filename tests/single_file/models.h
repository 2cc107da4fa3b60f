// Tiny models of four kinds as folders, and as single files of the original layout. The files are built with a
// recorded table of names (tools/golden/single_files.py), not the library's.
#pragma once

#include <string>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Writes the model folder `which` ("sd", "sd2", "sdxl", "refiner") to `folder`, with f32 weights.
void write_folder(const std::string& which, const std::string& folder);
/// Maps "unet/conv_in.weight" to the array, for every component of a folder.
HostArrays weights_of_folder(const std::string& folder);
/// The tensors of the single file for such a folder.
HostArrays original_of_folder(const std::string& which, const std::string& folder);

}  // namespace md
