// Names of activations in the blocks of models, for remat policies. A model gives a value all names that apply
// (ops/elementwise.h: named); the names are MaxDiffusion's.
#pragma once

namespace md::value {

inline constexpr const char* kHiddenStates = "hidden_states";  // input of a block
inline constexpr const char* kQueryProj = "query_proj";        // queries, keys and values, projected and normalised
inline constexpr const char* kKeyProj = "key_proj";
inline constexpr const char* kValueProj = "value_proj";
inline constexpr const char* kXqOut = "xq_out";  // queries and keys with rotary positions
inline constexpr const char* kXkOut = "xk_out";
inline constexpr const char* kSelfAttn = "self_attn";            // output of self attention
inline constexpr const char* kCrossAttn = "cross_attn";          // output of cross attention
inline constexpr const char* kAttnOutput = "attn_output";        // output of either
inline constexpr const char* kFfnActivation = "ffn_activation";  // between the layers of the feed-forward network
// Cross attention with separate text and image inputs.
inline constexpr const char* kKeyProjText = "key_proj_text";
inline constexpr const char* kValueProjText = "value_proj_text";
inline constexpr const char* kKeyProjImg = "key_proj_img";
inline constexpr const char* kValueProjImg = "value_proj_img";
// Blocks with an image stream and a text stream: their projections before normalization.
inline constexpr const char* kImgQkvProj = "img_qkv_proj";
inline constexpr const char* kTxtQkvProj = "txt_qkv_proj";
// Blocks with one linear layer before, and one after, parallel attention and feed-forward.
inline constexpr const char* kLin1Hidden = "lin1_norm_hidden_states";  // queries, keys and values, as above
inline constexpr const char* kLin2Hidden = "lin2_hidden_states";       // output of the second layer

inline constexpr const char* kAll[] = {kHiddenStates, kSelfAttn,      kCrossAttn,  kAttnOutput,   kQueryProj,
                                       kKeyProj,      kValueProj,     kXqOut,      kXkOut,        kFfnActivation,
                                       kKeyProjText,  kValueProjText, kKeyProjImg, kValueProjImg, kImgQkvProj,
                                       kTxtQkvProj,   kLin1Hidden,    kLin2Hidden};

}  // namespace md::value
