// Weights for a model: expected names and shapes, matched against the tensors of a file. Every expected weight must be
// in the file, and every tensor of the file must be expected. A table lists older published names.
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

/// Another spelling of a name in files: `found` in the file, `model_name` in the model.
struct NameAlias {
  std::string model_name, found;
  bool prefix = false;  // matches only at the beginning of the name (either may be empty); else at the first occurrence
};
/// CLIP with and without "text_model." or "vision_model."; T5's embedding by its other name; attention of autoencoders
/// before diffusers 0.15.
const std::vector<NameAlias>& published_aliases();

/// An expected array that the file does not have, or has with other sizes.
struct Misfit {
  std::string name;  // of the model
  Dims expected;
  std::optional<Dims> found;  // sizes of the file's tensor; none if the file has no such tensor
};

struct LoadOptions {
  std::vector<NameAlias> aliases = published_aliases();
  /// Suffixes of names in files that no model needs, or that the model has under another name.
  std::vector<std::string> ignorable = {"embeddings.position_ids", "encoder.embed_tokens.weight",
                                        ".norm_added_q.weight"};
  bool allow_unused = false;  // for a file that holds more than this model
  /// Names used by other programs, tried last. If they have a prefix, tensors with another prefix belong to other
  /// models and are ignored.
  WeightNameMap weight_names = {};
  bool keep_types = false;                   // keep the file's element types, not the model's
  std::set<std::string>* matched = nullptr;  // gets the names of the file's tensors that were matched
  std::vector<Misfit>* misfits = nullptr;    // receives what does not fit, before the error is thrown
};

/// Loads arrays by the model's names. `path`: as in SafetensorsReader::open. Shapes may differ by trailing sizes of 1
/// (linear layers that were 1×1 convolutions). Arrays that need no conversion borrow the memory map. Throws io listing
/// missing names with the nearest name of the file, unused names, and both shapes if they differ.
HostArrays load_weights(const std::string& path, const std::vector<WantedWeight>& weights,
                        const LoadOptions& options = {});
/// load_weights in two calls. This one matches names and shapes, from the headers alone, and throws the errors above.
/// The returned function reads and converts, and throws io if a file of a checkpoint does not match its checksums.
std::function<HostArrays()> open_weights(const std::string& path, const std::vector<WantedWeight>& weights,
                                         const LoadOptions& options = {});
/// The same, for a file opened at `path`.
std::function<HostArrays()> open_weights(const SafetensorsReader& file, const std::string& path,
                                         const std::vector<WantedWeight>& weights, const LoadOptions& options = {});

/// The same, but each array is read separately, on demand, and layers of a stack have their own names. Verifies a
/// checkpoint's checksums immediately. Releases the pages of the memory map after an array is copied.
std::map<std::string, ArrayToWrite> open_each_weight(const SafetensorsReader& file, const std::string& path,
                                                     const std::vector<WantedWeight>& weights,
                                                     const LoadOptions& options = {});

/// The files that were opened at `path`, including an index.
std::vector<std::string> weight_files(const SafetensorsReader& file, const std::string& path);

/// The layers of a stacked array under their published names: "blocks.*.w" [n, …] → "blocks.0.w" […], …; they share the
/// array's memory. A name without '*' comes back alone.
HostArrays unstacked(const std::string& name, const HostArray& array);
/// The layers of an array of which this process has some shards. Every layer is listed, possibly without shards.
NamedShards unstacked(const std::string& name, const ShardedArray& array);

}  // namespace md
