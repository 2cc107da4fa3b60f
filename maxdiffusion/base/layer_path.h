// Names of arrays that hold one layer after another.
#pragma once

#include <cstdint>
#include <string>

namespace md {

/// The part of a stacked array's path in the place of the layer's number, for layers from `first` on: "*", "*+3".
std::string stacked_part(int64_t first = 0);
/// Whether the path names a stack of layers: "blocks.*.w", "blocks.*+3.w".
bool is_stacked(const std::string& path);
/// Path of layer `row` of a stack: "blocks.*.w" → "blocks.2.w", "blocks.*+3.w" → "blocks.5.w" for row 2. Throws
/// internal unless the path names a stack.
std::string layer_path(const std::string& path, int64_t row);

}  // namespace md
