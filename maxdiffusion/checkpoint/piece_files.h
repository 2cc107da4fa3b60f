// Where the pieces of arrays lie among the files of a checkpoint: the index that several processes make together.
//
//   {"arrays": {"adam_m/unet/conv_in.weight": {"dtype": "F32", "shape": [320, 4, 3, 3], "pieces": [
//     {"file": "training_state/pieces-00000-of-00002.safetensors", "tensor": "adam_m/unet/conv_in.weight@0,0,0,0",
//      "offset": [0, 0, 0, 0], "size": [160, 4, 3, 3]}, …]}}}
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/mesh/pieces.h"

namespace md {

struct FilePiece {
  Slice slice;
  std::string file;    // a .safetensors file, relative to the folder of the checkpoint
  std::string tensor;  // its name there; it has the sizes of the slice
};
struct IndexedArray {
  Shape shape;
  std::vector<FilePiece> pieces;
};
/// By the name of the array.
using PieceIndex = std::map<std::string, IndexedArray>;

/// "training_state/pieces-00003-of-00016.safetensors", counted from 0.
std::string piece_file(int64_t process, int64_t processes);
/// "name@0,160".
std::string tensor_of_piece(const std::string& array, const Slice& slice);

std::string to_json(const PieceIndex& index);
/// Throws io naming `file`, from which the text is, and the array whose entry is damaged.
PieceIndex parse_index(const std::string& text, const std::string& file);
/// Adds the entries of `from`, which was read from `file`. Throws io where an array has two shapes.
void merge_index(PieceIndex& into, const PieceIndex& from, const std::string& file);
/// Throws io naming the first array whose pieces leave a hole, overlap or lie outside. `act`: "read '<file>'".
void check_tiled(const PieceIndex& index, const std::string& act);
/// The arrays of an index that was read from `file`, mapped from the files in `folder`. Throws io where these are not
/// what the index says.
NamedPieces open_pieces(const PieceIndex& index, const std::string& folder, const std::string& file);

}  // namespace md
