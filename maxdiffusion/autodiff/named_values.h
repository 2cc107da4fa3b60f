// Names of values inside the blocks of models, by which policies of rematerialisation choose. A model gives a value all
// names that fit it (ops/elementwise.h: named); names are MaxDiffusion's.
#pragma once

namespace md::value {

inline constexpr const char* kHiddenStates = "hidden_states";  // what a block reads
inline constexpr const char* kQueryProj = "query_proj";        // queries, keys and values, projected and normalised
inline constexpr const char* kKeyProj = "key_proj";
inline constexpr const char* kValueProj = "value_proj";
inline constexpr const char* kXqOut = "xq_out";  // queries and keys as attention reads them, with their positions
inline constexpr const char* kXkOut = "xk_out";
inline constexpr const char* kSelfAttn = "self_attn";            // what attention over the same tokens makes
inline constexpr const char* kCrossAttn = "cross_attn";          // what attention over other tokens makes
inline constexpr const char* kAttnOutput = "attn_output";        // what either makes
inline constexpr const char* kFfnActivation = "ffn_activation";  // between the layers of the feed-forward part
// Cross attention that reads a text and an image apart.
inline constexpr const char* kKeyProjText = "key_proj_text";
inline constexpr const char* kValueProjText = "value_proj_text";
inline constexpr const char* kKeyProjImg = "key_proj_img";
inline constexpr const char* kValueProjImg = "value_proj_img";
// Blocks where a picture and a text are two streams: what both are projected to, as it is before it is normalised.
inline constexpr const char* kImgQkvProj = "img_qkv_proj";
inline constexpr const char* kTxtQkvProj = "txt_qkv_proj";
// Blocks of one layer before attention and the feed-forward part and one behind both.
inline constexpr const char* kLin1Hidden = "lin1_norm_hidden_states";  // queries, keys and values, as above
inline constexpr const char* kLin2Hidden = "lin2_hidden_states";       // what the second layer makes

inline constexpr const char* kAll[] = {kHiddenStates, kSelfAttn,      kCrossAttn,  kAttnOutput,   kQueryProj,
                                       kKeyProj,      kValueProj,     kXqOut,      kXkOut,        kFfnActivation,
                                       kKeyProjText,  kValueProjText, kKeyProjImg, kValueProjImg, kImgQkvProj,
                                       kTxtQkvProj,   kLin1Hidden,    kLin2Hidden};

}  // namespace md::value
