// Names of weights in the files of other programs, for each name that diffusers or transformers publish.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace md {

struct WeightAlias {
  std::string prefix = {};          // prefix of this model in files that hold several models; may be empty
  std::string name;                 // after the prefix
  std::vector<int64_t> part = {0};  // indices of the parts, in order, that are concatenated to this array
  int64_t parts = 1;
  bool transposed = false;  // whether the file's matrix is transposed
  int64_t ones = 0;         // number of trailing dims of size 1 in the file's array

  std::string full_name() const { return prefix + name; }
};

/// Prefix of the text encoder with this name (clip_l, t5xxl, …) in ComfyUI's files of several models.
inline std::string of_text_encoder(const std::string& encoder) { return "text_encoders." + encoder + ".transformer."; }

/// Names of one model's weights.
struct WeightNameMap {
  /// Aliases of the weight published as `name`, the likeliest first; may return none.
  std::function<std::vector<WeightAlias>(const std::string& name)> aliases = {};
  /// Prefixes of names in such files that the model does not need.
  std::vector<std::string> unneeded = {};
  /// Value of general.architecture in GGUF files of this model; empty: no GGUF files use the names above.
  std::string architecture = {};
  /// The weight's name in those GGUF files; empty: that of the first alias without a prefix.
  std::function<std::string(const std::string& name)> gguf_name = {};
};

}  // namespace md
