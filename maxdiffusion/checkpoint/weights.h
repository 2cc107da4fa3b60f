// Weights for a model: what it wants by name and shape, matched against what a file holds. Everything wanted must be
// there and everything there must be wanted; older published names are known from one table of data.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/mesh/shards.h"

namespace md {

class SafetensorsReader;
struct ArrayToWrite;

struct WantedWeight {
  std::string name;  // published name; one '*' means 0 … n−1 where shape's leading size n is a stack of layers
  Shape shape;       // a float of another type is converted to this one
};

/// Another spelling of a name in files: `found` where the model says `wanted`.
struct NameAlias {
  std::string wanted, found;
  bool prefix = false;  // only at the beginning of the name (either may be empty); else the first place
};
/// CLIP with and without "text_model." or "vision_model."; T5's embedding by its other name; attention of autoencoders
/// before diffusers 0.15.
const std::vector<NameAlias>& published_aliases();

/// A wanted array that a file does not have, or has with other sizes.
struct Misfit {
  std::string name;  // wanted
  Dims wanted;
  std::optional<Dims> found;  // of the file's tensor; nothing: there is none
};

struct LoadOptions {
  std::vector<NameAlias> aliases = published_aliases();
  /// Ends of names that files hold and no model needs, or that it has under another name.
  std::vector<std::string> ignorable = {"embeddings.position_ids", "encoder.embed_tokens.weight",
                                        ".norm_added_q.weight"};
  bool allow_unused = false;  // for a file that holds more than this model
  /// Names of files of another program, tried last. Where they have a prefix, what the file holds under others is of
  /// other models.
  WeightNameMap weight_names = {};
  bool keep_types = false;                 // of the file, not those wanted
  std::set<std::string>* taken = nullptr;  // gets the names of the file's tensors that were matched
  std::vector<Misfit>* misfits = nullptr;  // gets what does not fit, before the error is thrown
};

/// Arrays by wanted name. `path` as SafetensorsReader::open takes it. Shapes may differ by sizes of 1 at the end
/// (linear layers that were 1×1 convolutions). Arrays that need no conversion borrow the memory map. Throws io listing
/// missing names with the nearest name of the file, unused names, and both shapes where they differ.
HostArrays load_weights(const std::string& path, const std::vector<WantedWeight>& wanted,
                        const LoadOptions& options = {});
/// load_weights in two calls: this one matches names and shapes, from the headers alone, and throws; its result reads
/// and converts, and throws io where a file of a checkpoint is not what was written.
std::function<HostArrays()> open_weights(const std::string& path, const std::vector<WantedWeight>& wanted,
                                         const LoadOptions& options = {});
/// The same, for a file opened at `path`.
std::function<HostArrays()> open_weights(const SafetensorsReader& file, const std::string& path,
                                         const std::vector<WantedWeight>& wanted, const LoadOptions& options = {});

/// The same, but each array is read separately, on demand; layers of a stack under their own names. What a
/// checkpoint's file is compared with is compared now. The memory map is left when an array was copied.
std::map<std::string, ArrayToWrite> open_each_weight(const SafetensorsReader& file, const std::string& path,
                                                     const std::vector<WantedWeight>& wanted,
                                                     const LoadOptions& options = {});

/// The files of what was opened at `path`, an index among them.
std::vector<std::string> weight_files(const SafetensorsReader& file, const std::string& path);

/// The layers of a stacked array under their published names: "blocks.*.w" [n, …] → "blocks.0.w" […], …; they share the
/// array's memory. A name without '*' comes back alone.
HostArrays unstacked(const std::string& name, const HostArray& array);
/// The layers of an array of which this process has shards: all are named, some may have no shards.
NamedShards unstacked(const std::string& name, const ShardedArray& array);

}  // namespace md
