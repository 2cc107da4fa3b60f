#include "maxdiffusion/tokenizers/clip_tokenizer.h"

#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/tokenizers/byte_pairs.h"
#include "maxdiffusion/tokenizers/clip_words.h"
#include "maxdiffusion/tokenizers/special_tokens.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char *kStart = "<|startoftext|>", *kEnd = "<|endoftext|>", *kSuffix = "</w>";
// CLIP uses the first 48894 merges of OpenAI's list: its 49408 ids without 256 bytes, 256 bytes at a word's end, start
// and end.
constexpr size_t kClipMerges = 49152 - 256 - 2;

// The first lines of a gzip'd text.
std::vector<std::string> gunzip_lines(const std::string& file, size_t count) {
  check(exists(file), Code::io, "CLIP vocabulary '{}': no such file", file);
  gzFile in = gzdopen(open_to_read(file), "rb");
  check(in != nullptr, Code::io, "CLIP vocabulary '{}': cannot be opened", file);
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> closer(in, gzclose);
  std::vector<std::string> lines;
  std::string rest;
  std::vector<char> block(1 << 17);
  while (lines.size() < count) {
    const int n = gzread(in, block.data(), static_cast<unsigned>(block.size()));
    int code = 0;
    check(n >= 0, Code::io, "CLIP vocabulary '{}': {}", file, gzerror(in, &code));
    if (n == 0) break;
    rest.append(block.data(), static_cast<size_t>(n));
    size_t start = 0;
    for (size_t end; lines.size() < count && (end = rest.find('\n', start)) != rest.npos; start = end + 1)
      lines.push_back(rest.substr(start, end - start));
    rest.erase(0, start);
  }
  return lines;
}

/// Lines of merges.txt.
std::vector<std::string> read_merges(const std::string& file) {
  std::vector<std::string> merges;
  const std::string text = read_file(file);
  for (size_t from = 0; from < text.size();) {
    const size_t to = std::min(text.find('\n', from), text.size());
    merges.push_back(text.substr(from, to - from));
    if (merges.back().ends_with('\r')) merges.back().pop_back();
    from = to + 1;
  }
  return merges;
}

/// Contents of tokenizer.json.
struct WholeFile {
  nlohmann::json vocab;
  std::vector<std::string> merges;
  std::vector<SpecialToken> added;
};

WholeFile read_whole(const nlohmann::json& whole, const std::string& file) {
  using nlohmann::json;
  const json model = whole.value("model", json());
  check(model.is_object() && model.value("type", "") == "BPE" && model.value("end_of_word_suffix", "") == kSuffix &&
            model.contains("vocab") && model["vocab"].is_object() && model.contains("merges") &&
            model["merges"].is_array(),
        Code::io, "tokenizer '{}': not the byte-pair model of CLIP (type BPE, suffix {}, vocab, merges)", file,
        kSuffix);
  WholeFile out{.vocab = model["vocab"], .merges = {}, .added = {}};
  for (const json& m : model["merges"]) {  // "a b", or ["a", "b"] in newer files
    const bool pair = m.is_array() && m.size() == 2 && m[0].is_string() && m[1].is_string();
    check(pair || m.is_string(), Code::io, "tokenizer '{}': merge {} is not a pair", file, m.dump());
    out.merges.push_back(pair ? m[0].get<std::string>() + " " + m[1].get<std::string>() : m.get<std::string>());
  }
  for (const json& token : whole.value("added_tokens", json::array())) {
    const bool ok = token.is_object() && token.value("content", json()).is_string() &&
                    token.value("id", json()).is_number_integer();
    check(ok, Code::io, "tokenizer '{}': an added token has no content or id", file);
    out.added.push_back({token["content"], token["id"], token.value("normalized", false)});
  }
  return out;
}

std::string json_quoted(const std::string& s) { return nlohmann::json(s).dump(); }

}  // namespace

struct ClipTokenizer::Vocabulary {
  std::vector<std::string> tokens;  // by id; "" where an id is unused
  std::unordered_map<std::string, int32_t> ids;
  std::vector<std::string> merge_lines;                     // "left right", by rank
  std::vector<std::pair<std::string, std::string>> merges;  // as pairs
  int32_t start = 0, end = 0, unknown = 0, pad = 0;
  int64_t max_length = 77;          // tokens of a text with start and end
  std::vector<SpecialToken> added;  // of the model folder, in addition to start, end, unknown and pad

  int32_t id_of(const std::string& token) const {
    auto it = ids.find(token);
    return it == ids.end() ? -1 : it->second;
  }
  void set_token(const std::string& token, int32_t id) {
    if (id >= static_cast<int32_t>(tokens.size())) tokens.resize(static_cast<size_t>(id) + 1);
    tokens[static_cast<size_t>(id)] = token;
    ids[token] = id;
  }
  // The id of a special token; a new one after all others if the vocabulary lacks it.
  int32_t special_id(const std::string& token) {
    if (int32_t id = id_of(token); id >= 0) return id;
    set_token(token, static_cast<int32_t>(tokens.size()));
    return static_cast<int32_t>(tokens.size()) - 1;
  }

  void add_merge(const std::string& line, const std::string& file, size_t number) {
    const size_t space = line.find(' ');
    check(space != line.npos && space > 0 && space + 1 < line.size() && line.find(' ', space + 1) == line.npos,
          Code::io, "{}:{}: expected two tokens, found '{}'", file, number, line.substr(0, 60));
    const std::string left = line.substr(0, space), right = line.substr(space + 1);
    for (const std::string& token : {left, right, left + right})
      check(id_of(token) >= 0, Code::io, "{}:{}: '{}' is not in the vocabulary", file, number, token);
    merges.emplace_back(left, right);
    merge_lines.push_back(line);
  }

  /// Throws unless every entry of the vocabulary is a letter, the result of a merge, or special: a truncated list of
  /// merges would otherwise silently give other ids.
  void check_reachable(const std::string& merges_file) const {
    std::unordered_set<int32_t> in_vocabulary;
    for (const auto& [left, right] : merges) in_vocabulary.insert(id_of(left + right));
    for (const SpecialToken& s : specials()) in_vocabulary.insert(s.id);
    int64_t lost = 0;
    std::string first;
    for (const auto& [token, id] : ids) {
      std::string_view letters = token;
      if (letters.ends_with(kSuffix)) letters.remove_suffix(std::string_view(kSuffix).size());
      int64_t points = 0;
      for (char c : letters) points += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
      if (points <= 1 || in_vocabulary.contains(id)) continue;
      if (lost++ == 0 || token < first) first = token;
    }
    check(
        lost == 0, Code::io,
        "tokenizer '{}': {} merges make {} of {} tokens of the vocabulary unreachable, such as '{}'; the list is cut, "
        "or "
        "of another vocabulary",
        merges_file, merge_lines.size(), lost, ids.size(), first);
  }
  /// How a tokenizer.json differs from the other files; empty: it does not.
  std::string difference(const WholeFile& w) const {
    nlohmann::json all = w.vocab;
    for (const SpecialToken& t : w.added) all[t.text] = t.id;
    for (const auto& [token, id] : all.items())
      if (const int32_t file_id = id_of(token); file_id != id)
        return fmt::format("'{}' is {} in tokenizer.json and {} in the other files", token, id.dump(), file_id);
    for (const auto& [token, id] : ids)
      if (!all.contains(token)) return fmt::format("'{}', which is {}, is not in tokenizer.json", token, id);
    const auto [its, file_merge] = std::ranges::mismatch(w.merges, merge_lines);
    if (its == w.merges.end() && file_merge == merge_lines.end()) return "";
    return fmt::format("merge {} is '{}' in tokenizer.json and '{}' in merges.txt", its - w.merges.begin(),
                       its == w.merges.end() ? "" : *its, file_merge == merge_lines.end() ? "" : *file_merge);
  }
  std::vector<SpecialToken> specials() const {
    std::vector<SpecialToken> all = added;
    for (int32_t id : {start, end, unknown, pad}) {
      const std::string& text = tokens[static_cast<size_t>(id)];
      if (std::ranges::none_of(all, [&](const SpecialToken& s) { return s.text == text; })) all.push_back({text, id});
    }
    return all;
  }

  /// Moves out `ids` and `merges`.
  WordTokenizerParts parts() {
    const auto pairs = std::make_shared<const BytePairs>(
        std::move(ids), merges,
        BytePairOptions{
            .unknown = tokens[static_cast<size_t>(unknown)], .continuation_prefix = "", .end_suffix = kSuffix},
        "CLIP's vocabulary");
    merges.clear();
    return {.normalize = normalize_clip_text,
            .cut = [](std::string_view text, bool, const auto& visit) { split_clip_words(text, visit); },
            .append =
                [pairs](std::string_view word, std::vector<int32_t>& out) {
                  std::string letters;
                  for (const char c : word) letters += byte_letters()[static_cast<uint8_t>(c)];
                  pairs->append(letters, out);
                },
            .specials = SpecialTokens(specials()),
            .before = {start},
            .behind = {end},
            .is_local = true,
            .end = end,
            .pad = pad,
            .size = static_cast<int64_t>(tokens.size())};
  }
};

ClipTokenizer::ClipTokenizer(std::unique_ptr<Vocabulary> v) : WordTokenizer(v->parts()), vocabulary_(std::move(v)) {}
ClipTokenizer::ClipTokenizer(ClipTokenizer&&) noexcept = default;
ClipTokenizer::~ClipTokenizer() = default;

ClipTokenizer ClipTokenizer::from_bpe(const std::string& file) {
  // The first line is a version.
  const std::vector<std::string> lines = gunzip_lines(file, kClipMerges + 1);
  check(lines.size() == kClipMerges + 1, Code::io, "CLIP vocabulary '{}': {} lines, expected at least {}", file,
        lines.size(), kClipMerges + 1);
  auto v = std::make_unique<Vocabulary>();
  v->tokens.reserve(49408);
  v->ids.reserve(49408);
  const auto append = [&](const std::string& token) { v->set_token(token, static_cast<int32_t>(v->tokens.size())); };
  // Bytes, then bytes at a word's end; unchanged ones first.
  std::vector<std::string> letters(byte_letters().begin(), byte_letters().end());
  std::stable_partition(letters.begin(), letters.end(), [](const std::string& c) { return c < "\u0100"; });
  for (const std::string& c : letters) append(c);
  for (const std::string& c : letters) append(c + kSuffix);
  for (size_t i = 1; i < lines.size(); ++i) {
    std::string whole = lines[i];
    std::erase(whole, ' ');
    append(whole);
    v->add_merge(lines[i], file, i + 1);
  }
  append(kStart);
  append(kEnd);
  v->start = v->id_of(kStart);
  v->end = v->unknown = v->pad = v->id_of(kEnd);
  return ClipTokenizer(std::move(v));
}

ClipTokenizer ClipTokenizer::from_folder(const std::string& folder) {
  using nlohmann::json;
  const auto path = [&](const char* name) { return (fs::path(folder) / name).string(); };
  const auto read_json = [&](const char* name) {
    json j = parse_json_or_discard(read_file(path(name)));
    check(j.is_object(), Code::io, "tokenizer '{}': not a JSON object", path(name));
    return j;
  };
  // A single file of the tokenizers library, or the two files of OpenAI's release.
  const bool one_file = !exists(path("vocab.json")) && exists(path("tokenizer.json"));
  for (const char* name : {"vocab.json", "merges.txt"}) {
    if (!one_file && !exists(path(name))) {
      throw Error(Code::io, fmt::format("tokenizer folder '{}': no {}", folder, name))
          .note("try: a folder with tokenizer.json, or with vocab.json and merges.txt, as transformers saves CLIP's");
    }
  }
  auto v = std::make_unique<Vocabulary>();
  const char* vocab_file = one_file ? "tokenizer.json" : "vocab.json";
  WholeFile whole;
  if (exists(path("tokenizer.json"))) {
    try {
      whole = read_whole(read_json("tokenizer.json"), path("tokenizer.json"));
    } catch (const Error& e) {
      if (one_file) throw;
      log_warning("{}; vocab.json and merges.txt are read instead", e.message());
    }
  }
  json vocab = one_file ? whole.vocab : read_json(vocab_file);
  const std::vector<std::string> merges = one_file ? whole.merges : read_merges(path("merges.txt"));
  std::vector<SpecialToken> added;
  if (one_file) {
    for (const SpecialToken& t : added = whole.added) vocab[t.text] = t.id;
  }
  v->ids.reserve(vocab.size());
  for (const auto& [token, id] : vocab.items()) {
    check(id.is_number_integer() && id >= 0 && id < 10'000'000, Code::io, "tokenizer '{}': the id of '{}' is {}",
          path(vocab_file), token, id.dump());
    v->set_token(token, id.get<int32_t>());
  }
  for (size_t i = 0; i < merges.size(); ++i)
    if (!merges[i].empty() && !merges[i].starts_with("#version"))
      v->add_merge(merges[i], path(one_file ? "tokenizer.json" : "merges.txt"), i + 1);
  v->added = std::move(added);

  // Special tokens: tokenizer_config.json first, then the older special_tokens_map.json; each a string or an object.
  std::vector<json> sources;
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    if (exists(path(name))) sources.push_back(read_json(name));
  }
  const auto flag = [](const json& j) { return j.is_object() && j.value("normalized", false); };
  const auto special = [&](const char* name, const char* fallback) {
    for (const json& source : sources) {
      auto it = source.find(name);
      if (it == source.end() || it->is_null()) continue;
      const json& content = it->is_object() ? it->value("content", json()) : *it;
      check(content.is_string(), Code::io, "tokenizer folder '{}': {} must be a string", folder, name);
      const int32_t id = v->special_id(content.get<std::string>());
      std::erase_if(v->added, [&](const SpecialToken& s) { return s.id == id; });
      v->added.push_back({content.get<std::string>(), id, flag(*it)});
      return id;
    }
    return v->special_id(fallback);
  };
  for (const json& source : sources) {
    if (!source.contains("added_tokens_decoder") || !source["added_tokens_decoder"].is_object()) continue;
    for (const auto& [id, token] : source["added_tokens_decoder"].items()) {
      const bool ok = token.is_object() && token.value("content", json()).is_string() && !id.empty() && id.size() < 8 &&
                      std::ranges::all_of(id, [](char c) { return c >= '0' && c <= '9'; });
      check(ok, Code::io, "tokenizer folder '{}': added_tokens_decoder: '{}' must be an id with a content", folder, id);
      const std::string content = token["content"];
      if (content.empty()) continue;
      v->set_token(content, std::stoi(id));
      v->added.push_back({content, std::stoi(id), flag(token)});
    }
  }
  for (const json& source : sources)
    if (const auto it = source.find("model_max_length");
        it != source.end() && it->is_number_integer() && *it > 0 && *it < 10'000'000)
      v->max_length = *it;
  v->start = special("bos_token", kStart);
  v->end = special("eos_token", kEnd);
  v->unknown = special("unk_token", kEnd);
  v->pad = special("pad_token", kEnd);
  v->check_reachable(path(one_file ? "tokenizer.json" : "merges.txt"));
  if (const std::string d = one_file || whole.vocab.is_null() ? "" : v->difference(whole); !d.empty())
    log_warning("tokenizer folder '{}': {}; vocab.json and merges.txt are read, tokenizer.json is not", folder, d);
  return ClipTokenizer(std::move(v));
}

void ClipTokenizer::set_pad_id(int32_t id) {
  check(id >= 0 && id < size() && !vocabulary_->tokens[static_cast<size_t>(id)].empty(), Code::invalid_config,
        "tokenizer: pad id {} is not in the vocabulary of {} tokens", id, size());
  std::erase_if(vocabulary_->added, [&](const SpecialToken& s) {
    return s.id == vocabulary_->pad && s.id != vocabulary_->start && s.id != vocabulary_->end &&
           s.id != vocabulary_->unknown;
  });
  vocabulary_->pad = id;
  parts_.specials = SpecialTokens(vocabulary_->specials());
  parts_.pad = id;
}

void ClipTokenizer::set_max_length(int64_t tokens) { vocabulary_->max_length = tokens; }

std::map<std::string, std::string> ClipTokenizer::files() const {
  std::map<std::string, std::string> out;
  std::string vocab = "{";
  for (size_t id = 0; id < vocabulary_->tokens.size(); ++id) {
    if (vocabulary_->tokens[id].empty()) continue;
    vocab += fmt::format("{}{}:{}", vocab.size() > 1 ? "," : "", json_quoted(vocabulary_->tokens[id]), id);
  }
  out["vocab.json"] = vocab + "}\n";
  std::string& merges = out["merges.txt"] = "#version: 0.2\n";
  for (const std::string& line : vocabulary_->merge_lines) merges += line + "\n";

  using json = nlohmann::ordered_json;
  const auto text = [&](int32_t id) { return vocabulary_->tokens[static_cast<size_t>(id)]; };
  json map{{"bos_token", text(vocabulary_->start)},
           {"eos_token", text(vocabulary_->end)},
           {"pad_token", text(vocabulary_->pad)},
           {"unk_token", text(vocabulary_->unknown)}};
  out["special_tokens_map.json"] = map.dump(2) + "\n";
  json decoder = json::object();
  for (const SpecialToken& s : parts_.specials.tokens()) {
    decoder[std::to_string(s.id)] = {{"content", s.text}, {"lstrip", false},      {"normalized", s.normalized},
                                     {"rstrip", false},   {"single_word", false}, {"special", true}};
  }
  json config{{"add_prefix_space", false}, {"added_tokens_decoder", decoder}};
  config.update(map);
  config.update(json{{"do_lower_case", true},
                     {"errors", "replace"},
                     {"model_max_length", vocabulary_->max_length},
                     {"tokenizer_class", "CLIPTokenizer"}});
  out["tokenizer_config.json"] = config.dump(2) + "\n";
  return out;
}

}  // namespace md
