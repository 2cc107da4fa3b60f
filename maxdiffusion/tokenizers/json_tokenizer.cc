#include "maxdiffusion/tokenizers/json_tokenizer.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/tokenizers/byte_pairs.h"
#include "maxdiffusion/tokenizers/special_tokens.h"
#include "maxdiffusion/tokenizers/text_steps.h"
#include "maxdiffusion/tokenizers/unigram.h"

namespace md {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

constexpr const char *kWhole = "tokenizer.json", *kConfig = "tokenizer_config.json", *kVocab = "vocab.json",
                     *kMerges = "merges.txt";
constexpr int64_t kMaxId = 10'000'000;

json read_object(const std::string& file) {
  json j = parse_json_or_discard(read_file(file));
  check(j.is_object(), Code::io, "{}: not a JSON object", file);
  return j;
}

/// The model of a tokenizer.json: the ids of a word, and of a token.
struct Model {
  std::function<void(std::string_view word, Ids& ids)> append;
  std::function<int32_t(const std::string& token)> find;
  int64_t size = 0;
};

std::string text_of(const json& j, const char* name) {
  const auto it = j.find(name);
  return it != j.end() && it->is_string() ? it->get<std::string>() : std::string();
}
bool flag_of(const json& j, const char* name, bool fallback = false) {
  const auto it = j.find(name);
  return it != j.end() && it->is_boolean() ? it->get<bool>() : fallback;
}

Model byte_pair_model(const json& model, const std::string& file) {
  check(model.contains("vocab") && model["vocab"].is_object() && model.contains("merges") && model["merges"].is_array(),
        Code::io, "{}: the model is BPE without a vocab of token → id and a list of merges", file);
  std::unordered_map<std::string, int32_t> ids;
  ids.reserve(model["vocab"].size());
  for (const auto& [token, id] : model["vocab"].items()) {
    check(id.is_number_integer() && id >= 0 && id < kMaxId, Code::io, "{}: the id of '{}' is {}", file, token,
          id.dump());
    ids[token] = id.get<int32_t>();
  }
  std::vector<std::pair<std::string, std::string>> merges;
  merges.reserve(model["merges"].size());
  for (const json& m : model["merges"]) {  // ["a", "b"], or "a b" in older files
    if (m.is_array() && m.size() == 2 && m[0].is_string() && m[1].is_string()) {
      merges.emplace_back(m[0].get<std::string>(), m[1].get<std::string>());
      continue;
    }
    const std::string pair = m.is_string() ? m.get<std::string>() : "";
    const size_t space = pair.find(' ');
    check(space != pair.npos, Code::io, "{}: merge {} is {}; expected two tokens", file, merges.size(), m.dump());
    merges.emplace_back(pair.substr(0, space), pair.substr(space + 1));
  }
  const auto pairs = std::make_shared<const BytePairs>(
      std::move(ids), merges,
      BytePairOptions{.unknown = text_of(model, "unk_token"),
                      .continuation_prefix = text_of(model, "continuing_subword_prefix"),
                      .end_suffix = text_of(model, "end_of_word_suffix"),
                      .fuse_unknown = flag_of(model, "fuse_unk"),
                      .byte_fallback = flag_of(model, "byte_fallback"),
                      .ignore_merges = flag_of(model, "ignore_merges")},
      file);
  return {[pairs](std::string_view word, Ids& out) { pairs->append(word, out); },
          [pairs](const std::string& token) { return pairs->find(token); }, pairs->size()};
}

Model unigram_model(const json& model, const std::string& file) {
  check(model.contains("vocab") && model["vocab"].is_array(), Code::io,
        "{}: the model is Unigram without a vocab of [token, score]", file);
  check(!flag_of(model, "byte_fallback"), Code::io, "{}: byte_fallback of a Unigram model is not supported", file);
  std::vector<Unigram::Piece> pieces;
  for (const json& p : model["vocab"]) {
    check(p.is_array() && p.size() == 2 && p[0].is_string() && p[1].is_number(), Code::io,
          "{}: entry {} of the vocab is {}; expected [token, score]", file, pieces.size(), p.dump());
    pieces.push_back({p[0], p[1]});
  }
  const json unknown = model.value("unk_id", json());
  check(unknown.is_number_integer() && unknown >= 0 && unknown < static_cast<int64_t>(pieces.size()), Code::io,
        "{}: unk_id is {}; expected the position of an entry of the vocab", file, unknown.dump());
  const auto unigram = std::make_shared<const Unigram>(std::move(pieces), unknown.get<int32_t>());
  return {[unigram](std::string_view word, Ids& out) { unigram->append(word, out); },
          [unigram](const std::string& token) { return unigram->find(token); },
          static_cast<int64_t>(unigram->pieces().size())};
}

Model make_model(const json& model, const std::string& file) {
  check(model.is_object(), Code::io, "{}: no model", file);
  std::string type = text_of(model, "type");
  if (type.empty()) type = model.contains("merges") ? "BPE" : "Unigram";  // older files have no type
  if (type == "BPE") return byte_pair_model(model, file);
  if (type == "Unigram") return unigram_model(model, file);
  fail(Code::io, "{}: the model '{}' is not one of: BPE, Unigram", file, type);
}

/// Ids that a post-processor adds before and after a text.
struct Frame {
  Ids before, behind;
};

void add_frame(const json& j, const std::string& file, Frame& frame) {
  if (j.is_null()) return;
  const std::string type = j.is_object() ? text_of(j, "type") : "";
  const auto id_of = [&](const char* name) {
    const json token = j.value(name, json());
    check(token.is_array() && token.size() == 2 && token[1].is_number_integer(), Code::io,
          "{}: {} of {} is {}; expected [token, id]", file, name, type, token.dump());
    return token[1].get<int32_t>();
  };
  if (type == "ByteLevel") return;  // changes offsets only
  if (type == "RobertaProcessing" || type == "BertProcessing") {
    frame.before.push_back(id_of("cls"));
    frame.behind.push_back(id_of("sep"));
    return;
  }
  if (type == "Sequence") {
    for (const json& one : j.value("processors", json::array())) add_frame(one, file, frame);
    return;
  }
  check(type == "TemplateProcessing", Code::io,
        "{}: the post-processor '{}' is not one of: Sequence, TemplateProcessing, RobertaProcessing, BertProcessing, "
        "ByteLevel",
        file, type);
  bool behind = false;
  for (const json& part : j.value("single", json::array())) {
    if (part.is_object() && part.contains("Sequence")) {
      behind = true;
      continue;
    }
    const std::string name =
        part.is_object() && part.contains("SpecialToken") ? text_of(part["SpecialToken"], "id") : std::string();
    const json tokens = j.value("special_tokens", json::object());
    const json ids = tokens.contains(name) ? tokens[name].value("ids", json()) : json();
    check(ids.is_array(), Code::io, "{}: the template names '{}', which its special_tokens lack", file, name);
    for (const json& id : ids) {
      check(id.is_number_integer() && id >= 0 && id < kMaxId, Code::io, "{}: the id of the template's '{}' is {}", file,
            name, id.dump());
      (behind ? frame.behind : frame.before).push_back(id.get<int32_t>());
    }
  }
}

/// The contents of vocab.json and merges.txt as the model of a tokenizer.json.
json with_vocabulary(json steps, const std::string& folder) {
  steps["model"]["vocab"] = read_object(folder + "/" + kVocab);
  json& merges = steps["model"]["merges"] = json::array();
  const std::string text = read_file(folder + "/" + kMerges);
  for (size_t from = 0, to; from < text.size(); from = to + 1) {
    to = std::min(text.find('\n', from), text.size());
    std::string line = text.substr(from, to - from);
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty() && !line.starts_with("#version")) merges.push_back(std::move(line));
  }
  return steps;
}

}  // namespace

JsonTokenizer JsonTokenizer::from_folder(const std::string& folder, std::string_view steps) {
  const auto path = [&](const char* name) { return folder + "/" + name; };
  const bool whole = exists(path(kWhole));
  if (!whole && (steps.empty() || !exists(path(kVocab)) || !exists(path(kMerges))))
    throw Error(Code::io, fmt::format("tokenizer folder '{}': no {}{}", folder, kWhole,
                                      steps.empty() ? "" : fmt::format(", and no {} with {}", kVocab, kMerges)))
        .note("try: a folder that transformers' save_pretrained has written");
  const std::string file = path(whole ? kWhole : kMerges);
  const json j = whole ? read_object(file) : with_vocabulary(parse_json(steps), folder);
  const json config = exists(path(kConfig)) ? read_object(path(kConfig)) : json::object();
  const Normalizer normalize = make_normalizer(j.value("normalizer", json()), file);
  const PreTokenizer cut = make_pre_tokenizer(j.value("pre_tokenizer", json()), file);
  const Model model = make_model(j.value("model", json()), file);
  Frame frame;
  add_frame(j.value("post_processor", json()), file, frame);
  WordTokenizerParts parts{.normalize = [normalize](std::string_view text) { return normalize(std::string(text)); },
                           .cut =
                               [cut](std::string_view text, bool first, const auto& visit) {
                                 for (const TextPart& word : cut({{std::string(text), first}})) visit(word.text);
                               },
                           .append = model.append,
                           .before = frame.before,
                           .behind = frame.behind,
                           .size = model.size,
                           .config = path(kConfig)};

  // Added tokens: the file's, then those of tokenizer_config.json, which take precedence; a named token that is in
  // neither list nor in the model gets the next id.
  std::map<std::string, SpecialToken> added;
  const auto add = [&](const json& token, std::optional<int64_t> id, const std::string& where) {
    check(token.is_object() && !text_of(token, "content").empty(), Code::io, "{}: the added token {} has no content",
          where, token.dump());
    const std::string content = text_of(token, "content");
    check(!flag_of(token, "single_word"), Code::io,
          "{}: the added token '{}' is looked for as a single word only, which is not supported", where, content);
    if (!id) id = model.find(content);
    if (*id < 0) id = parts.size;
    check(*id < kMaxId, Code::io, "{}: the id of the added token '{}' is {}", where, content, *id);
    parts.size = std::max(parts.size, *id + 1);
    const bool normalized = flag_of(token, "normalized", !flag_of(token, "special"));
    added[content] = {.text = normalized ? normalize(content) : content,
                      .id = static_cast<int32_t>(*id),
                      .normalized = normalized,
                      .strips_left = flag_of(token, "lstrip"),
                      .strips_right = flag_of(token, "rstrip")};
  };
  for (const json& token : j.value("added_tokens", json::array())) {
    const json id = token.is_object() ? token.value("id", json()) : json();
    check(id.is_number_integer() && id >= 0, Code::io, "{}: the added token {} has no id", file, token.dump());
    add(token, id.get<int64_t>(), file);
  }
  if (const auto list = config.find("added_tokens_decoder"); list != config.end() && list->is_object())
    for (const auto& [id, token] : list->items()) {
      const bool number = !id.empty() && id.size() < 8 && id.find_first_not_of("0123456789") == id.npos;
      check(number, Code::io, "{}: added_tokens_decoder: '{}' is not an id", path(kConfig), id);
      add(token, std::stoll(id), path(kConfig));
    }
  const auto named = [&](const char* name) -> std::optional<int32_t> {
    const auto it = config.find(name);
    if (it == config.end() || it->is_null()) return {};
    const std::string content = it->is_string() ? it->get<std::string>() : text_of(*it, "content");
    check(!content.empty(), Code::io, "{}: {} is {}; expected a token", path(kConfig), name, it->dump());
    if (!added.contains(content)) {
      json token = it->is_object() ? *it : json{{"content", content}};
      token["special"] = true;
      add(token, {}, path(kConfig));
    }
    return added.at(content).id;
  };
  for (const char* name : {"bos_token", "unk_token", "sep_token", "cls_token", "mask_token"}) named(name);
  parts.end = named("eos_token");
  parts.pad = named("pad_token");
  std::vector<SpecialToken> specials;
  for (const auto& [content, token] : added) specials.push_back(token);
  parts.specials = SpecialTokens(std::move(specials));
  for (const char* name :
       {kWhole, kConfig, kVocab, kMerges, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"})
    if (exists(path(name))) parts.files[name] = read_file(path(name));
  return JsonTokenizer(std::move(parts));
}

}  // namespace md
