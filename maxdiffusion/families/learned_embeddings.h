// Files of learned embeddings of tokens (textual inversion; Gal et al. 2022), and the keys of training them. Layouts:
//   {"<cat-toy>": [n, D]}            diffusers: the word is the tensor's name; for two encoders a file each
//   {"emb_params": [n, D]}           AUTOMATIC1111's web UI: the word is the file's name
//   {"clip_l": [n, D], "clip_g": …}  for the first and second text encoder; the word is the file's name
//   {"bundle_emb.WORD.clip_l": …}    the same in a LoRA file, also as emb_params or string_to_param.*
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/families/model_weights.h"

namespace md {

struct InversionKeys {
  std::string placeholder_token, initializer_token, learnable_property = "object";
  int64_t num_vectors = 1, repeats = 100;
  template <class V>
  void visit(V&& v) {
    v("placeholder_token", placeholder_token,
      "textual inversion: the word whose embeddings are trained, as in <cat-toy>; everything else is frozen; empty: "
      "off");
    v("initializer_token", initializer_token,
      "textual inversion: the word, of one token, whose embedding all vectors start with");
    v("num_vectors", num_vectors, "textual inversion: embeddings that the word means", in_range(1, 75));
    v("learnable_property", learnable_property,
      "textual inversion: captions are templates with the word, as of an object or of a style; captions: the captions "
      "of the "
      "data, which hold the word",
      one_of({"object", "style", "captions"}));
    v("repeats", repeats, "textual inversion with templates: samples of each image in an epoch", at_least(1));
  }
};

/// The names of the files that a run writes: for the family's text encoders in order, and for all of them in one file,
/// which ComfyUI reads.
std::vector<std::string> learned_embeddings_files(size_t encoders);
inline constexpr char kComfyEmbeddings[] = "learned_embeds_comfyui.safetensors";
/// The captions of learnable_property=object or style with this word.
std::vector<std::string> inversion_captions(const std::string& property, const std::string& word);

struct LearnedEmbedding {
  std::string word;
  HostArray rows;  // f32 [n, width]
};
/// By text encoder.
using LearnedEmbeddings = std::map<std::string, std::vector<LearnedEmbedding>>;
/// The embeddings of the keys, after those that `folder`'s own run has trained (empty: none), then those in LoRA files
/// that the text encoders have a place for. Logs each file. Throws invalid_config for a pickle (.pt, .bin), sizes that
/// no text encoder of the family has, a word given twice, and another number of embedding_tokens; io for a file that is
/// none of these layouts. Files of embeddings_dir that are for other models are skipped.
LearnedEmbeddings read_learned_embeddings(const ModelKeys& keys, const Family& family, const std::string& folder,
                                          const std::vector<std::string>& loras = {});
/// Whether a tensor of a LoRA file is among the embeddings.
bool is_learned(const LearnedEmbeddings& all, const FamilySpec& spec, const std::string& key, const HostArray& array);
/// Writes them as learned_embeddings_files and kComfyEmbeddings.
void write_learned_embeddings(const std::string& folder, const FamilySpec& spec, const LearnedEmbeddings& all);

}  // namespace md
