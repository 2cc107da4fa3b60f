// Names of logical axes. "" is an axis that is never sharded.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace md::axis {

inline constexpr const char* kBatch = "activation_batch";
inline constexpr const char* kConvBatch = "conv_batch";
inline constexpr const char* kLength = "activation_length";
inline constexpr const char* kKvLength = "activation_kv_length";
inline constexpr const char* kHeadsAct = "activation_heads";  // heads × head size of an activation
inline constexpr const char* kKv = "activation_kv";
// Heads and lengths inside self and cross attention, for models that distinguish them.
inline constexpr const char* kSelfHeads = "activation_self_attn_heads";
inline constexpr const char* kSelfLength = "activation_self_attn_q_length";
inline constexpr const char* kSelfKvLength = "activation_self_attn_kv_length";
inline constexpr const char* kCrossHeads = "activation_cross_attn_heads";
inline constexpr const char* kCrossLength = "activation_cross_attn_q_length";
inline constexpr const char* kCrossKvLength = "activation_cross_attn_kv_length";
inline constexpr const char* kEmbed = "embed";  // width of a parameter
inline constexpr const char* kHeads = "heads";  // heads × head size of a parameter
inline constexpr const char* kMlp = "mlp";
inline constexpr const char* kConvIn = "conv_in";
inline constexpr const char* kConvOut = "conv_out";
// Spatial axes of a convolution's weight.
inline constexpr const char* kWindowFrames = "window_frames";
inline constexpr const char* kWindowHeight = "window_height";
inline constexpr const char* kWindowWidth = "window_width";
inline constexpr const char* kOutChannels = "out_channels";  // channels of an activation
inline constexpr const char* kHidden = "hidden";
inline constexpr const char* kNorm = "norm";
inline constexpr const char* kVocab = "vocab";
inline constexpr const char* kData = "data_batch";  // axis 0 of every batch array: over all mesh axes

/// All names. An axis whose name has no rule is replicated; a name outside this list needs a rule.
inline constexpr const char* kAll[] = {
    kBatch,        kConvBatch,   kLength,        kKvLength, kHeadsAct, kKv,    kSelfHeads, kSelfLength, kSelfKvLength,
    kCrossHeads,   kCrossLength, kCrossKvLength, kEmbed,    kHeads,    kMlp,   kConvIn,    kConvOut,    kWindowFrames,
    kWindowHeight, kWindowWidth, kOutChannels,   kHidden,   kNorm,     kVocab, kData};

/// Axes of a batch array: axis 0 is kData, the others are replicated.
inline std::vector<std::string> of_batch(size_t rank) {
  std::vector<std::string> axes(rank);
  axes.at(0) = kData;
  return axes;
}

}  // namespace md::axis
