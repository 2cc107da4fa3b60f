// The words that name what an axis means. A tensor axis without meaning for sharding is "".
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
// Heads and lengths inside self and cross attention, where a model keeps the two apart.
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
// Of a convolution's weight: the places that it looks at.
inline constexpr const char* kWindowFrames = "window_frames";
inline constexpr const char* kWindowHeight = "window_height";
inline constexpr const char* kWindowWidth = "window_width";
inline constexpr const char* kOutChannels = "out_channels";  // channels of an activation
inline constexpr const char* kHidden = "hidden";
inline constexpr const char* kNorm = "norm";
inline constexpr const char* kVocab = "vocab";
inline constexpr const char* kData = "data_batch";  // axis 0 of every batch array: over all mesh axes

/// The whole vocabulary. A word without a rule leaves its axis whole; any other word must have a rule.
inline constexpr const char* kAll[] = {
    kBatch,        kConvBatch,   kLength,        kKvLength, kHeadsAct, kKv,    kSelfHeads, kSelfLength, kSelfKvLength,
    kCrossHeads,   kCrossLength, kCrossKvLength, kEmbed,    kHeads,    kMlp,   kConvIn,    kConvOut,    kWindowFrames,
    kWindowHeight, kWindowWidth, kOutChannels,   kHidden,   kNorm,     kVocab, kData};

/// Of an array of a batch: axis 0 is kData, the others are whole.
inline std::vector<std::string> of_batch(size_t rank) {
  std::vector<std::string> axes(rank);
  axes.at(0) = kData;
  return axes;
}

}  // namespace md::axis
