// The index of array shards in a checkpoint's files, written when several processes write it together.
//
//   {"arrays": {"adam_m/unet/conv_in.weight": {"dtype": "F32", "shape": [320, 4, 3, 3], "pieces": [
//     {"file": "training_state/pieces-00000-of-00002.safetensors", "tensor": "adam_m/unet/conv_in.weight@0,0,0,0",
//      "offset": [0, 0, 0, 0], "size": [160, 4, 3, 3]}, …]}}}
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/shards.h"

namespace md {

/// The file of the arrays that process 0 holds whole, and the index of shards.
inline constexpr const char* kArrays = "training_state/arrays.safetensors";
inline constexpr const char* kIndex = "training_state/index.json";

struct FileShard {
  Slice slice;
  std::string file;    // a .safetensors file, relative to the folder of the checkpoint
  std::string tensor;  // its name there; it has the sizes of the slice
  bool layer = false;  // whether it is one layer of a stack and lacks the layer axis
  int64_t row = -1;    // 0 or more: of a tensor that is a stack of other layers, the slice is this row
};
struct IndexedArray {
  Shape shape;
  std::vector<FileShard> shards;
};
/// By the name of the array.
using ShardIndex = std::map<std::string, IndexedArray>;

/// "training_state/pieces-00003-of-00016.safetensors", counted from 0.
std::string shard_file(int64_t process, int64_t processes);
/// "name@0,160".
std::string tensor_of_shard(const std::string& array, const Slice& slice);

std::string to_json(const ShardIndex& index);
/// Throws io naming `file`, the source of the text, and the array whose entry is damaged.
ShardIndex parse_index(const std::string& text, const std::string& file);
/// Adds the entries of `from`, which was read from `file`. Throws io if the two have different shapes of one array.
void merge_index(ShardIndex& into, const ShardIndex& from, const std::string& file);
/// Throws io naming the first array whose shards leave a gap, overlap or are out of bounds. `act`: "read '<file>'".
void check_tiled(const ShardIndex& index, const std::string& act);
/// "weights/unet/conv_in.weight": the name of a component's weight as an array of the training state.
std::string array_of_weight(const std::string& component, const std::string& weight);

}  // namespace md
