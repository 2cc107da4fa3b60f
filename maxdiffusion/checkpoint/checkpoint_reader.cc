#include "maxdiffusion/checkpoint/checkpoint_reader.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/checkpoint/bucket_checkpoints.h"
#include "maxdiffusion/checkpoint/checkpoint.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTrainingState = "training_state";

Slice with_layer(const Slice& slice, int64_t layer) {
  Slice out{{layer}, {1}};
  out.start.insert(out.start.end(), slice.start.begin(), slice.start.end());
  out.size.insert(out.size.end(), slice.size.begin(), slice.size.end());
  return out;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& folder)
    : origin_(folder),
      folder_(local_checkpoint(folder, CheckpointPart::component, kTrainingState)),
      state_json_(read_file(folder_ + "/" + kState)),
      index_(folder_ + "/" + kIndex),
      checksums_(folder_) {
  check(nlohmann::json::accept(state_json_), Code::io, "read '{}/{}': not JSON", folder_, kState);
  checksums_.verify(kTrainingState, ChecksumsOf::all_but_weights);
  checksums_.verify_sizes(kTrainingState);
  if (exists(index_)) {
    arrays_ = parse_index(read_file(index_), index_);
    check_tiled(arrays_, fmt::format("read '{}'", index_));
    return;
  }
  for (const auto& [name, a] : file(kArrays).tensors())
    arrays_[name] = {a.shape(), {{Slice::all(a.dims()), kArrays, name}}};
}

bool CheckpointReader::add_component(const std::string& component) {
  local_checkpoint(origin_, CheckpointPart::component, component);
  checksums_.verify(component, ChecksumsOf::all_but_weights);
  checksums_.verify_sizes(component);
  const std::string prefix = array_of_weight(component, ""), path = folder_ + "/" + component;
  if (const auto there = arrays_.lower_bound(prefix); there != arrays_.end() && there->first.starts_with(prefix))
    return true;
  if (!exists(path)) return false;
  for (const auto& f : fs::directory_iterator(path))
    if (f.path().extension() == ".safetensors") checksums_.verify_header(fs::relative(f.path(), folder_));
  const SafetensorsReader weights = SafetensorsReader::open(path);
  for (const auto& [name, a] : weights.tensors()) {
    const std::string file = fs::relative(weights.file_of(name), folder_);
    arrays_[array_of_weight(component, name)] = {a.shape(), {{Slice::all(a.dims()), file, name}}};
  }
  return true;
}

void CheckpointReader::add_stack(const std::string& array, int64_t layers) {
  const size_t star = array.find('*');
  check(star != array.npos && layers > 0, Code::internal, "'{}' is no stack of {} layers", array, layers);
  IndexedArray stack;
  for (int64_t i = 0; i < layers; ++i) {
    const std::string name = array.substr(0, star) + std::to_string(i) + array.substr(star + 1);
    const IndexedArray& layer = find(name);
    Shape expected{layer.shape.dtype, layer.shape.dims};
    expected.dims.insert(expected.dims.begin(), layers);
    if (i == 0) stack.shape = expected;
    check(stack.shape == expected, Code::io, "read '{}': '{}' is {}, and others of its layers are of another shape",
          folder_, name, to_string(layer.shape));
    for (FilePiece piece : layer.pieces) {
      piece.slice = with_layer(piece.slice, i);
      piece.layer = true;
      stack.pieces.push_back(std::move(piece));
    }
  }
  arrays_[array] = std::move(stack);
}

const IndexedArray& CheckpointReader::find(const std::string& array) const {
  const auto found = arrays_.find(array);
  check(found != arrays_.end(), Code::io, "read '{}': it has no '{}'", folder_, array);
  return found->second;
}

const SafetensorsReader& CheckpointReader::file(const std::string& name) {
  const auto there = files_.find(name);
  if (there != files_.end()) return there->second;
  checksums_.verify_header(name);
  return files_.emplace(name, SafetensorsReader::open(folder_ + "/" + name)).first->second;
}

CheckpointReader::Tensor CheckpointReader::tensor(const std::string& array, const Shape& shape,
                                                  const FilePiece& piece) {
  const SafetensorsReader& reader = file(piece.file);
  const auto found = reader.tensors().find(piece.tensor);
  check(found != reader.tensors().end(), Code::io,
        "read '{}': array '{}': '{}' should be in '{}', which does not hold it", index_, array, piece.tensor,
        piece.file);
  Shape expected{shape.dtype, piece.slice.size};
  if (piece.layer) expected.dims.erase(expected.dims.begin());
  check(found->second.shape() == expected, Code::io, "read '{}': array '{}': '{}' in '{}' is {}; expected {}", index_,
        array, piece.tensor, piece.file, to_string(found->second.shape()), to_string(expected));
  return {found->second.reshaped(piece.slice.size), reader.offset_of(piece.tensor)};
}

ArrayPieces CheckpointReader::read(const std::string& array, const std::vector<Slice>& slices) {
  const IndexedArray& indexed = find(array);
  const auto element = static_cast<int64_t>(size_of(indexed.shape.dtype));
  ArrayPieces out{indexed.shape, {}}, here{indexed.shape, {}};
  std::vector<bool> opened(indexed.pieces.size());
  for (const Slice& slice : slices) {
    check(slice.within(indexed.shape.dims), Code::internal, "'{}': {} is not a part of {}", array, to_string(slice),
          to_string(indexed.shape));
    for (size_t i = 0; i < indexed.pieces.size(); ++i) {
      const FilePiece& piece = indexed.pieces[i];
      const auto both = overlap(slice, piece.slice);
      if (!both) continue;
      const Tensor t = tensor(array, indexed.shape, piece);
      if (!opened[i]) here.pieces.push_back({piece.slice, t.values});
      opened[i] = true;
      each_run(*both, piece.slice, [&](int64_t first, int64_t count) {
        const uint64_t begin = t.offset + static_cast<uint64_t>(first * element);
        checksums_.verify_bytes(piece.file, begin, begin + static_cast<uint64_t>(count * element));
      });
    }
    out.pieces.push_back({slice, here.read(slice)});
  }
  return out;
}

ArrayPieces CheckpointReader::mapped(const std::string& array) {
  const IndexedArray& indexed = find(array);
  ArrayPieces out{indexed.shape, {}};
  for (const FilePiece& piece : indexed.pieces)
    out.pieces.push_back({piece.slice, tensor(array, indexed.shape, piece).values});
  return out;
}

}  // namespace md
