#include "maxdiffusion/families/learned_embeddings.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_file.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPickles[] = {".pt", ".bin", ".pth", ".ckpt"};
constexpr const char *kWebUi = "emb_params", *kPickled = "string_to_param.*", *kFirst = "clip_l", *kSecond = "clip_g";

bool is_pickle(const std::string& file) {
  return std::ranges::count(kPickles, fs::path(file).extension().string()) > 0;
}

/// One file: `word` is empty where the file does not say it.
struct File {
  std::string word;
  HostArray any;                        // for the text encoder of its width
  std::map<size_t, HostArray> encoder;  // for text encoders by number
};

HostArray as_rows(const std::string& file, const std::string& name, const HostArray& a) {
  check(a.shape().rank() == 1 || a.shape().rank() == 2, Code::io, "'{}': '{}' is {}; expected [vectors, width]", file,
        name, to_string(a.shape()));
  const HostArray values = a.cast(DType::f32);
  return a.shape().rank() == 2 ? values : values.reshaped({1, a.dims()[0]});
}

File read_file_of(const std::string& file) {
  if (is_pickle(file))
    throw Error(Code::invalid_config,
                fmt::format("embeddings: '{}' is a pickle, which can run any code when it is read; expected a "
                            ".safetensors file",
                            file))
        .note(
            "try: python -c \"import torch, safetensors.torch as s; d = torch.load('FILE', weights_only=True); "
            "s.save_file({'emb_params': d['string_to_param']['*'].detach().contiguous()}, 'FILE.safetensors')\"");
  const SafetensorsReader reader = SafetensorsReader::open(file);
  const HostArrays& tensors = reader.tensors();
  File out;
  const bool numbered = !tensors.empty() && std::ranges::all_of(tensors, [](const auto& t) {
    return t.first == kFirst || t.first == kSecond;
  });
  if (numbered) {
    for (const auto& [name, a] : tensors) out.encoder[name == kFirst ? 0 : 1] = as_rows(file, name, a);
    return out;
  }
  std::vector<std::string> names;
  for (const auto& [name, a] : tensors) names.push_back(name);
  check(tensors.size() == 1, Code::io,
        "'{}' is not a file of learned embeddings: it has the tensors {}; expected one, whose name is the word, or {}, "
        "or {} and {}",
        file, fmt::join(names, ", "), kWebUi, kFirst, kSecond);
  const auto& [name, a] = *tensors.begin();
  if (name != kWebUi) out.word = name;
  out.any = as_rows(file, name, a);
  return out;
}

/// Text encoders that embeddings may be added to, in order.
std::vector<const TextEncoderSpec*> encoders_of(const FamilySpec& spec) {
  std::vector<const TextEncoderSpec*> all;
  for (const TextEncoderSpec& e : spec.text_encoders)
    if (e.embedding_width > 0) all.push_back(&e);
  return all;
}

/// The word of a key of a LoRA file, and the number of the text encoder that its rows are for.
struct Bundled {
  std::string word;
  size_t encoder;
};
/// None if the key is no embedding's, or no text encoder has a place for it.
std::optional<Bundled> bundled(const std::vector<const TextEncoderSpec*>& encoders, const std::string& key,
                               const HostArray& a) {
  const std::string beginning = kBundledEmbeddings;
  if (!key.starts_with(beginning) || a.dims().empty() || a.dims().size() > 2) return std::nullopt;
  for (const std::string name : {kFirst, kSecond, kWebUi, kPickled}) {
    if (!key.ends_with("." + name) || key.size() <= beginning.size() + name.size() + 1) continue;
    const std::string word = key.substr(beginning.size(), key.size() - beginning.size() - name.size() - 1);
    const auto fits = [&](const TextEncoderSpec* e) { return e->embedding_width == a.dims().back(); };
    const size_t at = name == kFirst    ? 0
                      : name == kSecond ? 1
                                        : static_cast<size_t>(std::ranges::find_if(encoders, fits) - encoders.begin());
    if (at < encoders.size() && fits(encoders[at])) return Bundled{word, at};
  }
  return std::nullopt;
}

bool same(const HostArray& a, const HostArray& b) { return a.dims() == b.dims() && a.to_doubles() == b.to_doubles(); }

std::string widths(const std::vector<const TextEncoderSpec*>& encoders) {
  std::vector<std::string> all;
  for (const TextEncoderSpec* e : encoders) all.push_back(fmt::format("{} ({})", e->embedding_width, e->component));
  return fmt::format("{}", fmt::join(all, " or "));
}

/// Null: there is none.
const LearnedEmbedding* find_word(const LearnedEmbeddings& all, const std::string& component, const std::string& word) {
  const auto of = all.find(component);
  if (of == all.end()) return nullptr;
  const auto one = std::ranges::find(of->second, word, &LearnedEmbedding::word);
  return one == of->second.end() ? nullptr : &*one;
}

class Collected {
 public:
  explicit Collected(const Family& family) : encoders_(encoders_of(family.spec())) {}

  /// Adds a file; `optional`: does nothing for one of another model. Returns whether it was added.
  bool add(const std::string& path, const std::string& word_of_key, bool optional) {
    const File file = read_file_of(path);
    const std::string stem = fs::path(path).stem().string(), word = !word_of_key.empty() ? word_of_key
                                                                    : !file.word.empty() ? file.word
                                                                                         : stem;
    std::map<size_t, HostArray> parts = file.encoder;
    if (file.any) {
      const size_t at = place_of(file.any.dims()[1], word);
      if (at == encoders_.size() && optional) return false;
      check(at < encoders_.size(), Code::invalid_config,
            "embeddings: '{}' has vectors of {} numbers; expected {}, for this model's text encoders", path,
            file.any.dims()[1], widths(encoders_));
      parts[at] = file.any;
    }
    for (const auto& [i, rows] : parts) {
      const bool fits = i < encoders_.size() && encoders_[i]->embedding_width == rows.dims()[1];
      if (!fits && optional) return false;
      check(fits, Code::invalid_config,
            "embeddings: '{}': {} has vectors of {} numbers; expected {}, for this model's text encoders", path,
            i == 0 ? kFirst : kSecond, rows.dims()[1], widths(encoders_));
    }
    for (const auto& [i, rows] : parts) put(path, word, i, rows);
    return true;
  }
  /// Adds those of a LoRA file that a text encoder has a place for.
  void add_bundled(const std::string& path) {
    const SafetensorsReader file = SafetensorsReader::open(path);
    for (const auto& [key, a] : file.tensors()) {
      const std::optional<Bundled> found = bundled(encoders_, key, a);
      if (!found) continue;
      const HostArray rows = as_rows(path, key, a);
      const LearnedEmbedding* before = has(found->encoder, found->word);
      if (!before || !same(before->rows, rows)) put(path, found->word, found->encoder, rows);
    }
  }
  LearnedEmbeddings all;

 private:
  void put(const std::string& path, const std::string& word, size_t i, const HostArray& rows) {
    check(!has(i, word), Code::invalid_config,
          "embeddings: '{}' is for the word '{}', as is another file; expected different words", path, word);
    check(rows.dims()[0] > 0, Code::io, "'{}' holds no vectors", path);
    log_info("embeddings {}: '{}' means {} {} of {}", path, word, rows.dims()[0],
             rows.dims()[0] == 1 ? "vector" : "vectors", encoders_[i]->component);
    all[encoders_[i]->component].push_back({word, rows});
  }
  /// Null: the text encoder does not have the word.
  const LearnedEmbedding* has(size_t i, const std::string& word) const {
    return find_word(all, encoders_[i]->component, word);
  }
  /// The first text encoder of this width that does not have the word; the number of encoders if there is none.
  size_t place_of(int64_t width, const std::string& word) const {
    size_t of_width = encoders_.size();
    for (size_t i = encoders_.size(); i-- > 0;)
      if (encoders_[i]->embedding_width == width && (of_width == encoders_.size() || !has(i, word))) of_width = i;
    return of_width;
  }

  std::vector<const TextEncoderSpec*> encoders_;
};

}  // namespace

std::vector<std::string> learned_embeddings_files(size_t encoders) {
  std::vector<std::string> names = {"learned_embeds.safetensors"};
  for (size_t i = 2; i <= encoders; ++i) names.push_back(fmt::format("learned_embeds_{}.safetensors", i));
  return names;
}

// Source: Gal et al. 2022, An Image is Worth One Word, supplementary material: texts for objects, after those of CLIP
// for ImageNet, and for styles.
std::vector<std::string> inversion_captions(const std::string& property, const std::string& word) {
  const std::vector<const char*> objects = {"a photo of a {}",           "a rendering of a {}",
                                            "a cropped photo of the {}", "the photo of a {}",
                                            "a photo of a clean {}",     "a photo of a dirty {}",
                                            "a dark photo of the {}",    "a photo of my {}",
                                            "a photo of the cool {}",    "a close-up photo of a {}",
                                            "a bright photo of the {}",  "a cropped photo of a {}",
                                            "a photo of the {}",         "a good photo of the {}",
                                            "a photo of one {}",         "a close-up photo of the {}",
                                            "a rendition of the {}",     "a photo of the clean {}",
                                            "a rendition of a {}",       "a photo of a nice {}",
                                            "a good photo of a {}",      "a photo of the nice {}",
                                            "a photo of the small {}",   "a photo of the weird {}",
                                            "a photo of the large {}",   "a photo of a cool {}",
                                            "a photo of a small {}"},
                                 styles = {
                                     "a painting in the style of {}",         "a rendering in the style of {}",
                                     "a cropped painting in the style of {}", "the painting in the style of {}",
                                     "a clean painting in the style of {}",   "a dirty painting in the style of {}",
                                     "a dark painting in the style of {}",    "a picture in the style of {}",
                                     "a cool painting in the style of {}",    "a close-up painting in the style of {}",
                                     "a bright painting in the style of {}",  "a good painting in the style of {}",
                                     "a rendition in the style of {}",        "a nice painting in the style of {}",
                                     "a small painting in the style of {}",   "a weird painting in the style of {}",
                                     "a large painting in the style of {}"};
  std::vector<std::string> out;
  for (const std::string text : property == "style" ? styles : objects) {
    const size_t at = text.find("{}");
    out.push_back(text.substr(0, at) + word + text.substr(at + 2));
  }
  return out;
}

bool is_learned(const LearnedEmbeddings& all, const FamilySpec& spec, const std::string& key, const HostArray& array) {
  const std::vector<const TextEncoderSpec*> encoders = encoders_of(spec);
  const std::optional<Bundled> found = bundled(encoders, key, array);
  if (!found) return false;
  const LearnedEmbedding* one = find_word(all, encoders[found->encoder]->component, found->word);
  return one && same(one->rows, as_rows(key, key, array));
}

LearnedEmbeddings read_learned_embeddings(const ModelKeys& keys, const Family& family, const std::string& folder,
                                          const std::vector<std::string>& loras) {
  const size_t encoders = encoders_of(family.spec()).size();
  const std::vector<std::string> files = split_paths(keys.embeddings), words = split_at_commas(keys.embedding_tokens);
  check(encoders > 0 || (files.empty() && keys.embeddings_dir.empty()), Code::invalid_config,
        "embeddings or embeddings_dir is given; expected none: this model's text encoders take no learned embeddings");
  check(words.empty() || words.size() == files.size(), Code::invalid_config,
        "embedding_tokens has {} words for {} files of embeddings; expected one each", words.size(), files.size());
  Collected found(family);
  for (const std::string& name : learned_embeddings_files(encoders))
    if (const std::string file = folder + "/" + name; !folder.empty() && encoders > 0 && exists(file)) {
      verify_component(file);
      found.add(file, "", false);
    }
  for (size_t i = 0; i < files.size(); ++i) found.add(files[i], words.empty() ? "" : words[i], false);
  for (const std::string& lora : loras) found.add_bundled(lora);
  if (keys.embeddings_dir.empty()) return found.all;
  check(fs::is_directory(keys.embeddings_dir), Code::io, "embeddings_dir '{}': no such folder", keys.embeddings_dir);
  std::vector<std::string> listed;
  for (const auto& f : fs::recursive_directory_iterator(keys.embeddings_dir))
    if (f.is_regular_file()) listed.push_back(f.path().string());
  std::ranges::sort(listed);
  for (const std::string& file : listed) {
    if (is_pickle(file)) log_warning("embeddings_dir: '{}' is skipped: it is a pickle, not a .safetensors file", file);
    if (!file.ends_with(".safetensors")) continue;
    try {
      if (!found.add(file, "", true))
        log_info("embeddings_dir: '{}' is skipped: it is for text encoders of other widths", file);
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      log_warning("embeddings_dir: skipped: {}", e.message());
    }
  }
  return found.all;
}

void write_learned_embeddings(const std::string& folder, const FamilySpec& spec, const LearnedEmbeddings& all) {
  const std::vector<const TextEncoderSpec*> encoders = encoders_of(spec);
  const std::vector<std::string> names = learned_embeddings_files(encoders.size());
  HostArrays together;
  for (size_t i = 0; i < encoders.size(); ++i) {
    HostArrays tensors;
    for (const LearnedEmbedding& e : all.at(encoders[i]->component)) {
      tensors[e.word] = e.rows;
      together[i == 0 ? kFirst : kSecond] = e.rows;
    }
    write_safetensors(folder + "/" + names[i], tensors);
  }
  if (encoders.size() > 1) write_safetensors(folder + "/" + kComfyEmbeddings, together);
}

}  // namespace md
