#include "maxdiffusion/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/layer_path.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"

namespace md {
namespace {

constexpr const char* kTrainingState = "training_state";

Slice without_layer(const Slice& slice) {
  return {{slice.start.begin() + 1, slice.start.end()}, {slice.size.begin() + 1, slice.size.end()}};
}

Slice with_layer(const Slice& slice, int64_t layer) {
  Slice out{{layer}, {1}};
  out.start.insert(out.start.end(), slice.start.begin(), slice.start.end());
  out.size.insert(out.size.end(), slice.size.begin(), slice.size.end());
  return out;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& folder, FromBucket mode)
    : origin_(folder),
      folder_(mode == FromBucket::copies ? local_checkpoint(folder, CheckpointPart::component, kTrainingState)
                                         : folder),
      checksums_(folder_,
                 "a resumed run does not read it: its model and scheduler come from its model folder; "
                 "give the checkpoint to a new run as pretrained_model_name_or_path to train on with it"),
      state_json_(checksums_.files().text(kState)),
      index_(checksums_.files().path_of(kIndex)) {
  check(!parse_json_or_discard(state_json_).is_discarded(), Code::io, "read '{}': not JSON",
        checksums_.files().path_of(kState));
  checksums_.verify(kTrainingState, ChecksumsOf::all_but_weights);
  checksums_.verify_sizes(kTrainingState);
  if (checksums_.files().size(kIndex)) {
    arrays_ = parse_index(checksums_.files().text(kIndex), index_);
    check_tiled(arrays_, fmt::format("read '{}'", index_));
    return;
  }
  for (const auto& [name, a] : file(kArrays).tensors())
    arrays_[name] = {a.shape(), {{Slice::all(a.dims()), kArrays, name}}};
}

void CheckpointReader::warn_of_configs() { checksums_.warn_of_configs(); }

bool CheckpointReader::add_component(const std::string& component) {
  if (!checksums_.files().remote()) local_checkpoint(origin_, CheckpointPart::component, component);
  checksums_.verify(component, ChecksumsOf::all_but_weights);
  checksums_.verify_sizes(component);
  const std::string prefix = array_of_weight(component, "");
  if (const auto entry = arrays_.lower_bound(prefix); entry != arrays_.end() && entry->first.starts_with(prefix))
    return true;
  ShardIndex weights;
  for (const std::string& name : checksums_.files().in(component)) {
    if (!name.ends_with(".safetensors")) continue;
    for (const auto& [tensor, a] : file(name).tensors())
      merge_index(weights, {{prefix + tensor, {a.shape(), {{Slice::all(a.dims()), name, tensor}}}}}, name);
  }
  check_tiled(weights, fmt::format("read '{}'", checksums_.files().path_of(component)));
  arrays_.insert(weights.begin(), weights.end());
  return !weights.empty();
}

void CheckpointReader::add_stack(const std::string& array, int64_t layers) {
  check(is_stacked(array) && layers > 0, Code::internal, "'{}' is not a stack of {} layers", array, layers);
  IndexedArray stack;
  for (int64_t i = 0; i < layers; ++i) {
    const std::string name = layer_path(array, i);
    const IndexedArray& layer = find(name);
    Shape expected{layer.shape.dtype, layer.shape.dims};
    expected.dims.insert(expected.dims.begin(), layers);
    if (i == 0) stack.shape = expected;
    check(stack.shape == expected, Code::io, "read '{}': '{}' is {}; other layers of the stack have another shape",
          folder_, name, to_string(layer.shape));
    for (FileShard shard : layer.shards) {
      shard.slice = with_layer(shard.slice, i);
      shard.layer = true;
      stack.shards.push_back(std::move(shard));
    }
  }
  arrays_[array] = std::move(stack);
}

std::optional<std::string> CheckpointReader::with_layers(const std::string& array, const Dims& dims) {
  const auto same = arrays_.find(array);
  if (same != arrays_.end() && same->second.shape.dims == dims) return array;
  if (!rows_) {
    rows_.emplace();
    for (const auto& [name, a] : arrays_)
      for (int64_t row = 0; is_stacked(name) && a.shape.rank() > 0 && row < a.shape.dims[0]; ++row)
        (*rows_)[layer_path(name, row)] = {name, row};
  }
  const bool stacked = is_stacked(array);
  if (stacked && dims.empty()) return {};
  IndexedArray made;
  std::vector<Slice> slices;
  for (int64_t i = 0; i < (stacked ? dims[0] : 1); ++i) {
    const std::string layer = stacked ? layer_path(array, i) : array;
    const auto single = arrays_.find(layer);
    const auto row = rows_->find(layer);
    const bool is_row = single == arrays_.end();
    if (is_row && row == rows_->end()) return {};
    const IndexedArray& source = is_row ? find(row->second.first) : single->second;
    for (FileShard shard : source.shards) {
      if (is_row) {
        shard.row = row->second.second - shard.slice.start[0];
        if (shard.row < 0 || shard.row >= shard.slice.size[0]) continue;
        shard.slice = without_layer(shard.slice);
      }
      if (shard.slice.size.size() < dims.size()) {
        shard.slice = with_layer(shard.slice, i);
        shard.layer = !is_row;
      } else if (stacked && !dims.empty()) {
        shard.slice.start[0] += i;
      }
      if (shard.slice.size.size() != dims.size()) return {};
      slices.push_back(shard.slice);
      made.shards.push_back(std::move(shard));
    }
    if (i > 0 && made.shape.dtype != source.shape.dtype) return {};
    made.shape = {source.shape.dtype, dims};
  }
  if (!tiling_fault(dims, slices).empty()) return {};
  const std::string name = "layers of " + array;
  arrays_[name] = std::move(made);
  return name;
}

const IndexedArray& CheckpointReader::find(const std::string& array) const {
  const auto found = arrays_.find(array);
  check(found != arrays_.end(), Code::io, "read '{}': it has no '{}'", folder_, array);
  return found->second;
}

const SafetensorsReader& CheckpointReader::file(const std::string& name) {
  const auto cached = files_.find(name);
  if (cached != files_.end()) return cached->second;
  CheckpointFiles& files = checksums_.files();
  checksums_.verify_header(name);
  SafetensorsReader reader = SafetensorsReader::of(files.path_of(name), files.map(name));
  const auto is_copied = [&](const auto& tensor) {  // not aligned in the file; others are borrowed
    return tensor.second.data() != files.map(name).data + reader.offset_of(tensor.first);
  };
  if (files.remote() && std::ranges::any_of(reader.tensors(), is_copied)) {
    checksums_.verify_bytes(name, 0, files.map(name).size);
    reader = SafetensorsReader::of(files.path_of(name), files.map(name));
  }
  return files_.emplace(name, std::move(reader)).first->second;
}

CheckpointReader::Tensor CheckpointReader::tensor(const std::string& array, const Shape& shape,
                                                  const FileShard& shard) {
  const SafetensorsReader& reader = file(shard.file);
  const auto found = reader.tensors().find(shard.tensor);
  check(found != reader.tensors().end(), Code::io,
        "read '{}': array '{}': '{}' should be in '{}', which does not hold it", index_, array, shard.tensor,
        shard.file);
  const HostArray& whole = found->second;
  const bool of_stack = shard.row >= 0 && whole.shape().rank() > 0 && shard.row < whole.dims()[0];
  const HostArray held = of_stack ? row_of(whole, shard.row) : whole;
  Shape expected{shape.dtype, shard.slice.size};
  if (shard.layer || (of_stack && held.shape().rank() < expected.rank())) expected.dims.erase(expected.dims.begin());
  check(held.shape() == expected, Code::io, "read '{}': array '{}': '{}' in '{}' is {}; expected {}", index_, array,
        shard.tensor, shard.file, to_string(held.shape()), to_string(expected));
  const auto offset = static_cast<uint64_t>(of_stack ? shard.row * held.bytes() : 0);
  return {held.reshaped(shard.slice.size), reader.offset_of(shard.tensor) + offset};
}

template <class F>
void CheckpointReader::each_stretch(const std::string& array, const Slice& part, F&& take) {
  const IndexedArray& indexed = find(array);
  check(part.within(indexed.shape.dims), Code::internal, "'{}': {} is not a part of {}", array, to_string(part),
        to_string(indexed.shape));
  const auto element = static_cast<int64_t>(size_of(indexed.shape.dtype));
  for (const FileShard& shard : indexed.shards) {
    const auto both = overlap(part, shard.slice);
    if (!both) continue;
    const Tensor t = tensor(array, indexed.shape, shard);
    each_run(*both, shard.slice, [&](int64_t first, int64_t count) {
      const uint64_t begin = t.offset + static_cast<uint64_t>(first * element);
      take(shard, t.values, begin, begin + static_cast<uint64_t>(count * element));
    });
  }
}

void CheckpointReader::fetch(const Parts& parts) {
  if (!checksums_.files().remote()) return;
  // The first chunk of a file contains its header.
  std::set<std::string> files;
  for (const auto& [array, slices] : parts)
    for (const FileShard& shard : find(array).shards)
      if (std::ranges::any_of(slices, [&](const Slice& s) { return overlap(s, shard.slice).has_value(); }))
        files.insert(shard.file);
  std::vector<CheckpointFiles::Range> ranges;
  for (const std::string& name : files)
    if (!files_.contains(name) && checksums_.files().size(name)) ranges.push_back({name, 0, 1});
  checksums_.fetch(ranges);
  ranges.clear();
  const uint64_t chunk = checksums_.chunk_bytes();
  for (const auto& [array, slices] : parts)
    for (const Slice& slice : slices)
      each_stretch(array, slice, [&](const FileShard& shard, const HostArray&, uint64_t begin, uint64_t end) {
        // Stretches are many and short: those in one chunk, or the next, become one range.
        const bool goes_on = !ranges.empty() && ranges.back().name == shard.file && begin >= ranges.back().begin &&
                             begin / chunk <= (ranges.back().end - 1) / chunk + 1;
        if (goes_on)
          ranges.back().end = std::max(ranges.back().end, end);
        else
          ranges.push_back({shard.file, begin, end});
      });
  checksums_.fetch(ranges);
}

ShardedArray CheckpointReader::read(const std::string& array, const std::vector<Slice>& slices) {
  const IndexedArray& indexed = find(array);
  if (checksums_.files().remote()) fetch({{array, slices}});
  ShardedArray out{indexed.shape, {}}, read_shards{indexed.shape, {}};
  std::set<const FileShard*> opened;
  for (const Slice& slice : slices) {
    each_stretch(array, slice, [&](const FileShard& shard, const HostArray& values, uint64_t begin, uint64_t end) {
      if (opened.insert(&shard).second) read_shards.shards.push_back({shard.slice, values});
      checksums_.verify_bytes(shard.file, begin, end);
    });
    out.shards.push_back({slice, read_shards.read(slice)});
  }
  return out;
}

ShardedArray CheckpointReader::mapped(const std::string& array) {
  const IndexedArray& indexed = find(array);
  ShardedArray out{indexed.shape, {}};
  for (const FileShard& shard : indexed.shards)
    out.shards.push_back({shard.slice, tensor(array, indexed.shape, shard).values});
  return out;
}

}  // namespace md
