#include "maxdiffusion/tokenizers/t5_tokenizer.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/tokenizers/charsmap.h"
#include "maxdiffusion/tokenizers/sentencepiece.pb.h"
#include "maxdiffusion/tokenizers/special_tokens.h"
#include "maxdiffusion/tokenizers/unigram.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char *kSpace = "▁", *kModel = "spiece.model", *kWhole = "tokenizer.json",
                     *kConfig = "tokenizer_config.json", *kMap = "special_tokens_map.json";
constexpr int32_t kUnknown = 2;        // id of the unknown token in all of T5's vocabularies
constexpr int32_t kExtraTokens = 100;  // <extra_id_0> …, default; tokenizer_config.json may set it

/// The vocabulary and other fields of its file.
struct Vocabulary {
  std::vector<Unigram::Piece> pieces;
  Charsmap charsmap;
  json added = json::array();         // added_tokens of tokenizer.json
  std::vector<std::string> specials;  // of spiece.model: control and user-defined pieces
};

std::string extra_token(int64_t i) { return fmt::format("<extra_id_{}>", i); }

json parse(const std::string& file) {
  json j = parse_json_or_discard(read_file(file));
  check(j.is_object(), Code::io, "{}: not a JSON object", file);
  return j;
}

Vocabulary read_tokenizer_json(const std::string& file) {
  json whole = parse(file);
  Vocabulary v;
  const json model = whole.value("model", json());
  check(
      model.is_object() && model.value("type", "") == "Unigram" && model.contains("vocab") && model["vocab"].is_array(),
      Code::io, "{}: 'model' is not a Unigram with a list of tokens", file);
  for (const json& piece : model["vocab"]) {
    check(piece.is_array() && piece.size() == 2 && piece[0].is_string() && piece[1].is_number(), Code::io,
          "{}: token {} is {}; expected [text, score]", file, v.pieces.size(), piece.dump());
    v.pieces.push_back({piece[0], piece[1]});
  }
  json normalizers = whole.value("normalizer", json());
  if (normalizers.is_object() && normalizers.contains("normalizers")) normalizers = json(normalizers["normalizers"]);
  if (normalizers.is_object()) normalizers = json::array({normalizers});
  for (const json& n : normalizers)
    if (n.value("type", "") == "Precompiled" && n.contains("precompiled_charsmap")) {
      if (n["precompiled_charsmap"].is_string())
        v.charsmap = Charsmap::from_base64(n["precompiled_charsmap"].get<std::string>(), file);
      break;
    }
  v.added = whole.value("added_tokens", json::array());
  return v;
}

/// Reads spiece.model; adds `extra` tokens after the model's.
Vocabulary read_sentencepiece(const std::string& file, int64_t extra) {
  sentencepiece::Model model;
  check(model.ParseFromString(read_file(file)) && model.pieces_size() > 0, Code::io, "{}: not a SentencePiece model",
        file);
  check(model.trainer_spec().model_type() == 1, Code::io,
        "{}: a model of type {}; expected 1, a unigram model, which T5's are", file, model.trainer_spec().model_type());
  Vocabulary v;
  for (const sentencepiece::Piece& p : model.pieces()) {
    v.pieces.push_back({p.piece(), p.score()});
    if (p.type() == 3 || p.type() == 4) v.specials.push_back(p.piece());
  }
  for (int64_t i = extra - 1; i >= 0; --i) v.pieces.push_back({extra_token(i), 0});
  v.charsmap = Charsmap(model.normalizer_spec().precompiled_charsmap(), file);
  return v;
}

/// How a spiece.model differs from tokenizer.json, which also has the extra tokens; empty: it does not.
std::string difference(const Vocabulary& whole, const Vocabulary& model) {
  // The first three tokens have different names in the two files.
  for (size_t i = kUnknown + 1; i < model.pieces.size(); ++i) {
    if (i >= whole.pieces.size()) return fmt::format("token {} is not in {}", i, kWhole);
    const Unigram::Piece &a = whole.pieces[i], &b = model.pieces[i];
    const bool special = std::ranges::count(model.specials, b.text) > 0;
    if (a.text != b.text || (!special && static_cast<float>(a.score) != static_cast<float>(b.score)))
      return fmt::format("token {} is '{}' ({}) in {} and '{}' ({}) in {}", i, a.text, a.score, kWhole, b.text, b.score,
                         kModel);
  }
  return "";
}

/// A token as files write it: its text, or an object with flags.
SpecialToken read_token(const json& token, const std::string& file) {
  if (token.is_string()) return {.text = token};
  check(token.is_object() && token.value("content", json()).is_string(), Code::io,
        "{}: {} is not a token; expected a text or an object with a content", file, token.dump());
  check(!token.value("single_word", false), Code::io,
        "{}: the token '{}' is only looked for as a single word, which is not supported", file,
        token["content"].get<std::string>());
  return {.text = token["content"],
          .normalized = token.value("normalized", !token.value("special", false)),
          .strips_left = token.value("lstrip", false),
          .strips_right = token.value("rstrip", false)};
}

/// Special tokens besides the named ones: those listed in tokenizer_config.json; else those of special_tokens_map.json
/// or the model, and <extra_id_0> … unless that list has some.
std::vector<json> extra_tokens(const json& config, const std::vector<std::string>& from_model, int64_t extra) {
  std::vector<json> out;
  if (const auto list = config.find("extra_special_tokens"); list != config.end()) {
    if (list->is_array()) out.assign(list->begin(), list->end());
    return out;
  }
  out.assign(from_model.begin(), from_model.end());
  const auto additional = config.find("additional_special_tokens");
  if (out.empty() && additional != config.end() && additional->is_array())
    out.assign(additional->begin(), additional->end());
  if (std::ranges::none_of(out, [](const json& t) { return t.dump().find("<extra_id_") != std::string::npos; }))
    for (int64_t i = 0; i < extra; ++i) out.emplace_back(extra_token(i));
  return out;
}

/// Calls visit for each word with '▁' before it: white space separates words, and a '▁' in the text also begins a word.
void for_each_word(std::string_view text, const std::function<void(std::string_view)>& visit) {
  std::string word;
  const auto flush = [&] {
    if (!word.empty()) visit(word);
    word.clear();
  };
  for_each_code_point(text, [&](char32_t c, size_t from, size_t to) {
    if (u_isUWhiteSpace(static_cast<UChar32>(c))) return flush();
    if (c == U'▁')
      flush();
    else if (word.empty())
      word = kSpace;
    word += text.substr(from, to - from);
  });
  flush();
}

}  // namespace

T5Tokenizer T5Tokenizer::from_folder(const std::string& folder) {
  const auto path = [&](const char* name) { return folder + "/" + name; };
  const bool whole = exists(path(kWhole));
  if (!whole && !exists(path(kModel)))
    throw Error(Code::io, fmt::format("tokenizer folder '{}': no {} and no {}", folder, kWhole, kModel))
        .note("try: a folder as transformers saves T5's tokenizer");
  json config = exists(path(kConfig)) ? parse(path(kConfig)) : json::object();
  check(config.value("padding_side", "right") == "right" && config.value("truncation_side", "right") == "right",
        Code::io, "{}: padding and truncation on the left are not supported; expected right", path(kConfig));
  const int64_t extra = config.value("extra_ids", int64_t{kExtraTokens});
  check(extra >= 0 && extra <= 1'000'000, Code::io, "{}: extra_ids is {}", path(kConfig), extra);
  Vocabulary vocabulary = whole ? read_tokenizer_json(path(kWhole)) : read_sentencepiece(path(kModel), extra);
  if (whole && exists(path(kModel))) {
    std::string fault;
    try {
      fault = difference(vocabulary, read_sentencepiece(path(kModel), 0));
    } catch (const Error& e) {
      fault = e.message();
    }
    if (!fault.empty()) log_warning("tokenizer folder '{}': {}; {} is read, {} is not", folder, fault, kWhole, kModel);
  }
  check(vocabulary.pieces.size() > kUnknown, Code::io,
        "tokenizer folder '{}': {} tokens; expected <pad>, </s>, <unk> "
        "and more",
        folder, vocabulary.pieces.size());
  const json added = std::move(vocabulary.added);
  const std::vector<std::string> from_model = std::move(vocabulary.specials);
  const auto model = std::make_shared<const Unigram>(std::move(vocabulary.pieces), kUnknown);
  WordTokenizerParts parts{
      .normalize = [charsmap = std::move(vocabulary.charsmap)](std::string_view raw) { return charsmap.apply(raw); },
      .cut = [](std::string_view text, bool, const auto& visit) { for_each_word(text, visit); },
      .append = [model](std::string_view word, std::vector<int32_t>& ids) { model->append(word, ids); },
      .is_local = true,
      .size = static_cast<int64_t>(model->pieces().size())};
  for (const char* name : {kWhole, kModel, kConfig, kMap})
    if (exists(path(name))) parts.files[name] = read_file(path(name));

  // Special tokens are first those listed with flags in the files, then the named ones, then the extra ones; one that
  // is not a piece gets the next id.
  std::vector<SpecialToken> specials;
  const auto id_of = [&](const std::string& text) {
    const auto known = std::ranges::find(specials, text, &SpecialToken::text);
    return known == specials.end() ? model->find(text) : known->id;
  };
  const auto add = [&](const SpecialToken& special) {
    SpecialToken t = special;
    if (t.text.empty() || std::ranges::count(specials, t.text, &SpecialToken::text) > 0) return;
    t.id = id_of(t.text);
    if (t.id < 0) t.id = static_cast<int32_t>(parts.size++);
    specials.push_back(std::move(t));
  };
  if (config.contains("additional_special_tokens") && !config.contains("extra_special_tokens")) {
    config["extra_special_tokens"] = config["additional_special_tokens"];
    config.erase("additional_special_tokens");
  }
  if (config.contains("added_tokens_decoder")) {
    std::map<int64_t, SpecialToken> by_id;
    for (const auto& [id, token] : config["added_tokens_decoder"].items())
      by_id[std::strtoll(id.c_str(), nullptr, 10)] = read_token(token, path(kConfig));
    for (const auto& [id, token] : by_id) add(token);
  } else {
    if (exists(path(kMap))) config.update(parse(path(kMap)));
    for (const json& token : added) add(read_token(token, path(kWhole)));
  }
  const auto named = [&](const char* name, const char* fallback) {
    const json token = config.value(name, json());
    SpecialToken t = token.is_null() ? SpecialToken{.text = fallback} : read_token(token, path(kConfig));
    add(t);
    return t.text.empty() ? -1 : id_of(t.text);
  };
  named("bos_token", "");
  parts.end = named("eos_token", "</s>");
  named("unk_token", "<unk>");
  named("sep_token", "");
  parts.pad = named("pad_token", "<pad>");
  for (const char* name : {"cls_token", "mask_token"}) named(name, "");
  for (const json& token : extra_tokens(config, from_model, extra)) add(read_token(token, path(kConfig)));
  parts.behind = {*parts.end};
  parts.specials = SpecialTokens(std::move(specials));
  return T5Tokenizer(std::move(parts));
}

}  // namespace md
