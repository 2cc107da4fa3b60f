#include "maxdiffusion/encoders/prompt_syntax.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/replaced.h"
#include "maxdiffusion/base/shortened.h"

namespace md {
namespace {

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || (c & 0x80) != 0; }

/// Parses the whole text as a finite number.
std::optional<double> number_in(std::string text) {
  while (!text.empty() && is_space(text.back())) text.pop_back();
  text.erase(0, static_cast<size_t>(std::ranges::find_if_not(text, is_space) - text.begin()));
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  double value = 0;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(value) ? std::optional(value)
                                                                                          : std::nullopt;
}

/// For a weight ":1.3)" at `at`: its length and the number's text; length 0: there is none.
std::pair<size_t, std::string> weight_at(const std::string& s, size_t at) {
  size_t i = at + 1;
  while (i < s.size() && is_space(s[i])) ++i;
  const size_t begin = i;
  if (i < s.size() && (s[i] == '+' || s[i] == '-')) ++i;
  const size_t digits = i;
  while (i < s.size() && (s[i] == '.' || std::isdigit(static_cast<unsigned char>(s[i])))) ++i;
  const std::string number = s.substr(begin, i - begin);
  while (i < s.size() && is_space(s[i])) ++i;
  return i < s.size() && s[i] == ')' && i > digits && begin + number.size() > digits
             ? std::pair(i + 1 - at, number)
             : std::pair(size_t{0}, std::string());
}

/// Appends text, split at the word BREAK and the spaces around it.
void add_text(std::vector<WeightedText>& out, const std::string& text) {
  static const std::string kBreak = "BREAK";
  size_t from = 0;
  for (size_t at = 0; (at = text.find(kBreak, at)) != std::string::npos; ++at) {
    const size_t end = at + kBreak.size();
    if ((at > 0 && is_word(text[at - 1])) || (end < text.size() && is_word(text[end]))) continue;
    std::string before = text.substr(from, at - from);
    while (!before.empty() && is_space(before.back())) before.pop_back();
    out.push_back({before});
    out.push_back({"", 1, true});
    for (from = end; from < text.size() && is_space(text[from]);) ++from;
  }
  out.push_back({text.substr(from)});
}

std::vector<WeightedText> parse_a1111(const std::string& s) {
  std::vector<WeightedText> out;
  std::vector<size_t> round, square;  // positions of open brackets
  auto multiply = [&](std::vector<size_t>& open, double by) {
    for (size_t i = open.back(); i < out.size(); ++i) out[i].weight *= by;
    open.pop_back();
  };
  for (size_t i = 0; i < s.size();) {
    if (s[i] == '\\') {  // a backslash before other characters is dropped
      const bool escapes = i + 1 < s.size() && std::strchr("()[]\\", s[i + 1]);
      out.push_back({escapes ? s.substr(i + 1, 1) : ""});
      i += escapes ? 2 : 1;
    } else if (s[i] == '(' || s[i] == '[') {
      (s[i] == '(' ? round : square).push_back(out.size());
      ++i;
    } else if (const auto [length, number] = s[i] == ':' ? weight_at(s, i) : std::pair(size_t{0}, std::string());
               length > 0) {
      if (round.empty()) {
        add_text(out, s.substr(i, length));
      } else {
        const auto weight = number_in(number);
        check(weight.has_value(), Code::invalid_config,
              "prompt: the weight '{}' in \"{}\"; expected a number, as in 1.3", number, s);
        multiply(round, *weight);
      }
      i += length;
    } else if ((s[i] == ')' && !round.empty()) || (s[i] == ']' && !square.empty())) {
      multiply(s[i] == ')' ? round : square, s[i] == ')' ? 1.1 : 1 / 1.1);
      ++i;
    } else {
      size_t end = i + 1;
      if (!std::strchr("()[]:", s[i])) end = std::min(s.find_first_of("\\()[]:", i), s.size());
      add_text(out, s.substr(i, end - i));
      i = end;
    }
  }
  while (!round.empty()) multiply(round, 1.1);
  while (!square.empty()) multiply(square, 1 / 1.1);
  return out;
}

void parse_comfyui(const std::string& s, double weight, std::vector<WeightedText>& out, int depth = 0) {
  constexpr int kMostDepth = 100;
  check(depth < kMostDepth, Code::invalid_config, "prompt: more than {} nested brackets; expected fewer", kMostDepth);
  int nesting = 0;
  std::string item;
  std::vector<std::string> items;
  for (const char c : s) {
    if (c == '(' && nesting++ == 0) {
      if (!item.empty()) items.push_back(item);
      item.clear();
    }
    item += c;
    if (c == ')' && --nesting == 0) items.push_back(std::exchange(item, ""));
  }
  if (!item.empty()) items.push_back(item);
  for (std::string x : items) {
    if (x.size() < 2 || !x.starts_with('(') || !x.ends_with(')')) {
      out.push_back({x, weight});
      continue;
    }
    x = x.substr(1, x.size() - 2);
    double inner_weight = weight * 1.1;
    const size_t colon = x.rfind(':');
    if (colon != std::string::npos && colon > 0)
      if (const auto number = number_in(x.substr(colon + 1))) inner_weight = *number, x.resize(colon);
    parse_comfyui(x, inner_weight, out, depth + 1);
  }
}

/// Tokens of a text without start and end.
std::vector<int32_t> tokens_of(const Tokenizer& t, const std::string& text) {
  std::vector<int32_t> ids = t.tokens(text, 1 << 20);
  return {ids.begin() + 1, ids.end() - 1};
}

/// The ids in parts: each placeholder of several ids, and the ids between them.
std::vector<std::vector<int32_t>> separated(const Tokenizer& t, const std::vector<int32_t>& ids) {
  std::vector<std::vector<int32_t>> out(1);
  for (size_t i = 0; i < ids.size();) {
    const auto n = static_cast<size_t>(t.together(ids[i]));
    if (n > 1) out.emplace_back();
    for (size_t k = 0; k < n && i < ids.size(); ++k) out.back().push_back(ids[i++]);
    if (n > 1) out.emplace_back();
  }
  return out;
}

struct Chunker {
  const Tokenizer& tokenizer;
  size_t room;  // tokens without start and end
  int32_t start = tokenizer.tokens("", 2).front();
  std::vector<TokenChunk> chunks = {};
  TokenChunk chunk = {};

  void add(int32_t id, double weight) { chunk.ids.push_back(id), chunk.weights.push_back(static_cast<float>(weight)); }
  /// Adds start, end and padding to the chunk.
  void close() {
    chunk.ids.insert(chunk.ids.begin(), start), chunk.weights.insert(chunk.weights.begin(), 1.0f);
    chunk.ids.push_back(tokenizer.end_id());
    chunk.ids.resize(room + 2, tokenizer.pad_id());
    chunk.weights.resize(room + 2, 1.0f);
    chunks.push_back(std::exchange(chunk, {}));
  }
};

void chunk_a1111(const std::vector<WeightedText>& parts, Chunker& c) {
  constexpr size_t kBack = 20;
  const std::vector<int32_t> commas = tokens_of(c.tokenizer, ",");
  const int32_t comma = commas.size() == 1 ? commas[0] : -1;
  size_t behind_comma = 0;  // number of the chunk's tokens up to its last comma; 0: none
  auto next = [&] { c.close(), behind_comma = 0; };
  for (const WeightedText& part : parts) {
    if (part.breaks) {
      next();
      continue;
    }
    for (const int32_t id : tokens_of(c.tokenizer, part.text)) {
      if (const int64_t together = c.tokenizer.together(id);
          together > 1 && c.chunk.ids.size() + static_cast<size_t>(together) > c.room && !c.chunk.ids.empty())
        next();
      if (id == comma) {
        behind_comma = c.chunk.ids.size() + 1;  // reset below if the chunk is full
      } else if (c.chunk.ids.size() == c.room && behind_comma > 0 && c.chunk.ids.size() - (behind_comma - 1) <= kBack) {
        TokenChunk rest;
        const auto at = static_cast<int64_t>(behind_comma);
        rest.ids.assign(c.chunk.ids.begin() + at, c.chunk.ids.end());
        rest.weights.assign(c.chunk.weights.begin() + at, c.chunk.weights.end());
        c.chunk.ids.resize(behind_comma), c.chunk.weights.resize(behind_comma);
        next();
        c.chunk = std::move(rest);
      }
      if (c.chunk.ids.size() == c.room) next();
      c.add(id, part.weight);
    }
  }
  if (!c.chunk.ids.empty() || c.chunks.empty()) next();
}

void chunk_comfyui(const std::vector<WeightedText>& parts, Chunker& c) {
  constexpr size_t kLong = 8;
  for (const WeightedText& part : parts) {
    for (const std::vector<int32_t>& ids : separated(c.tokenizer, tokens_of(c.tokenizer, part.text))) {
      const bool is_long = ids.size() >= kLong;
      for (size_t at = 0; at < ids.size();) {
        const size_t left = ids.size() - at, space = c.room - c.chunk.ids.size();
        if (left > space && !is_long) {
          c.close();
          continue;
        }
        for (const size_t end = at + std::min(left, space); at < end; ++at) c.add(ids[at], part.weight);
        if (left > space) c.close();
      }
    }
  }
  if (!c.chunk.ids.empty() || c.chunks.empty()) c.close();
}

/// Multiplies features [from, to) of each token by its weight, and rescales them to their previous mean in each chunk.
void multiply(std::span<float> chunk, size_t width, size_t from, size_t to, const std::vector<float>& weights) {
  double before = 0, after = 0;
  for (size_t i = 0; i < weights.size(); ++i)
    for (size_t d = from; d < to; ++d) {
      float& v = chunk[i * width + d];
      before += v, after += static_cast<double>(v) * weights[i];
      v *= weights[i];
    }
  const auto scale = static_cast<float>(before / after);
  for (size_t i = 0; i < weights.size(); ++i)
    for (size_t d = from; d < to; ++d) chunk[i * width + d] *= scale;
}

void move_from(std::span<const float> empty, std::span<float> chunk, size_t width, size_t from, size_t to,
               const std::vector<float>& weights) {
  for (size_t i = 0; i < weights.size(); ++i)
    for (size_t d = from; d < to; ++d) {
      const float e = empty[i * width + d];
      chunk[i * width + d] = (chunk[i * width + d] - e) * weights[i] + e;
    }
}

bool is_weighted(const TokenChunk& c) {
  return std::ranges::any_of(c.weights, [](float w) { return w != 1; });
}

/// [N, L, D] → [N, times·L, D].
HostArray repeated(const HostArray& a, int64_t times) {
  if (times == 1) return a;
  HostArray out(Shape{a.dtype(), {a.dims()[0], a.dims()[1] * times, a.dims()[2]}});
  const size_t row = a.bytes() / static_cast<size_t>(a.dims()[0]);
  std::byte* to = out.mutable_data();
  for (int64_t n = 0; n < a.dims()[0]; ++n)
    for (int64_t i = 0; i < times; ++i, to += row) std::memcpy(to, a.data() + static_cast<size_t>(n) * row, row);
  return out;
}

/// [N, L, D] → [N, length, D] with zeros at the end.
HostArray padded(const HostArray& a, int64_t length) {
  HostArray out(Shape{a.dtype(), {a.dims()[0], length, a.dims()[2]}});
  std::memset(out.mutable_data(), 0, out.bytes());
  set_block(out, 0, 0, a);
  return out;
}

/// Whether texts of these lengths are equally long, with that of the longest, once they are repeated.
bool repeats(const std::vector<int64_t>& lengths) {
  const int64_t most = std::ranges::max(lengths);
  return std::ranges::all_of(lengths, [most](int64_t n) { return most % n == 0; });
}

}  // namespace

std::vector<WeightedText> parse_weights(const std::string& syntax, const std::string& prompt) {
  std::vector<WeightedText> parts, out;
  if (syntax == "a1111") {
    parts = parse_a1111(prompt);
  } else {
    const std::string close = "\x01", open = "\x02";
    parse_comfyui(replaced(replaced(prompt, "\\)", close), "\\(", open), 1, parts);
    for (WeightedText& p : parts) p.text = replaced(replaced(p.text, close, ")"), open, "(");
  }
  constexpr double kLargest = 1e6;  // embeddings times their weights stay finite
  for (WeightedText& p : parts) {
    check(std::abs(p.weight) <= kLargest, Code::invalid_config,
          "prompt: the weights around \"{}\" multiply to {:.3g}; expected at most {:.0f} in size", shortened(p.text),
          p.weight, kLargest);
    if (syntax == "a1111" && !out.empty() && !p.breaks && !out.back().breaks && out.back().weight == p.weight)
      out.back().text += p.text;
    else
      out.push_back(std::move(p));
  }
  return out;
}

std::vector<TokenChunk> token_chunks(const std::string& syntax, const std::string& prompt, const Tokenizer& tokenizer,
                                     int64_t max_tokens) {
  Chunker c{tokenizer, static_cast<size_t>(max_tokens) - 2};
  (syntax == "a1111" ? chunk_a1111 : chunk_comfyui)(parse_weights(syntax, prompt), c);
  return c.chunks;
}

HostArrays encode_weighted(TextEncoder& text, const Family& family, const std::string& syntax,
                           const std::vector<std::string>& captions, const std::vector<std::string>& seconds,
                           int64_t clip_skip, int64_t batch) {
  const FamilySpec& spec = family.spec();
  const std::vector<TextEncoderSpec>& encoders = spec.text_encoders;
  // For each encoder, the chunks of all captions in sequence; the empty text is last.
  std::vector<std::vector<TokenChunk>> all(encoders.size());
  std::vector<int64_t> counts;
  auto pad = [&](size_t e) { return token_chunks(syntax, "", *encoders[e].tokenizer, encoders[e].max_tokens).front(); };
  for (size_t i = 0; i < captions.size(); ++i) {
    std::vector<std::vector<TokenChunk>> chunks_of_caption;
    size_t most = 0;
    for (const TextEncoderSpec& e : encoders) {
      const std::string& caption = e.second_prompt && !seconds.empty() ? seconds[i] : captions[i];
      chunks_of_caption.push_back(token_chunks(syntax, caption, *e.tokenizer, e.max_tokens));
      most = std::max(most, chunks_of_caption.back().size());
    }
    for (size_t e = 0; e < encoders.size(); ++e) {
      chunks_of_caption[e].resize(most, pad(e));
      std::ranges::move(chunks_of_caption[e], std::back_inserter(all[e]));
    }
    counts.push_back(static_cast<int64_t>(most));
  }
  const int64_t most = std::ranges::max(counts);
  if (most > 1) log_info("prompt_syntax={}: {} chunks of {} tokens", syntax, most, encoders[0].max_tokens - 2);
  const size_t chunks = all[0].size();
  HostArrays ids;
  for (size_t e = 0; e < encoders.size(); ++e) {
    all[e].push_back(pad(e));
    std::vector<int32_t> flat;
    for (const TokenChunk& c : all[e]) flat.insert(flat.end(), c.ids.begin(), c.ids.end());
    ids[encoders[e].ids] =
        HostArray::of<int32_t>({DType::s32, {static_cast<int64_t>(chunks + 1), encoders[e].max_tokens}}, flat);
  }
  HostArrays encoded = text.encode_tokens(ids, clip_skip, batch);

  const std::string& field = spec.conditioning.front().name;
  HostArray& hidden = encoded.at(field);
  const auto width = static_cast<size_t>(hidden.dims()[2]), tokens = static_cast<size_t>(hidden.dims()[1]);
  const std::span<float> values = hidden.mutable_view<float>();
  const std::span<const float> empty = values.subspan(chunks * tokens * width);
  for (size_t e = 0, from = 0; e < encoders.size(); from += static_cast<size_t>(spec.chunk_widths[e++]))
    for (size_t i = 0; i < chunks; ++i) {
      if (!is_weighted(all[e][i])) continue;
      const std::span<float> chunk = values.subspan(i * tokens * width, tokens * width);
      const size_t to = from + static_cast<size_t>(spec.chunk_widths[e]);
      if (syntax == "a1111")
        multiply(chunk, width, from, to, all[e][i].weights);
      else
        move_from(empty, chunk, width, from, to, all[e][i].weights);
    }
  const bool repeat = repeats(counts);
  std::vector<int32_t> lengths;
  HostArrays out;
  const auto n = static_cast<int64_t>(captions.size());
  for (const auto& [name, a] : encoded) {
    int64_t at = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t count = counts[static_cast<size_t>(i)];
      HostArray row = rows(a, at, name == field ? count : 1);
      if (name == field) {
        HostArray joined(Shape{a.dtype(), {1, count * a.dims()[1], a.dims()[2]}});
        std::memcpy(joined.mutable_data(), row.data(), row.bytes());
        row = repeat ? repeated(joined, most / count) : padded(joined, most * a.dims()[1]);
        lengths.push_back(static_cast<int32_t>(count * a.dims()[1]));
      }
      add_rows(out[name], n, i, row);
      at += count;
    }
  }
  if (!repeat) out[FamilySpec::kChunkRows] = HostArray::of<int32_t>({DType::s32, {n}}, lengths);
  return out;
}

void make_equally_long(const FamilySpec& spec, HostArrays& a, HostArrays& b) {
  constexpr const char* kRows = FamilySpec::kChunkRows;
  const std::string& field = spec.conditioning.front().name;
  const std::vector<int64_t> lengths = {a.at(field).dims()[1], b.at(field).dims()[1]};
  const int64_t most = std::ranges::max(lengths);
  const bool repeat = repeats(lengths) && !a.contains(kRows) && !b.contains(kRows);
  for (HostArrays* half : {&a, &b}) {
    HostArray& x = half->at(field);
    const int64_t n = x.dims()[0], length = x.dims()[1];
    if (!repeat && !half->contains(kRows))
      (*half)[kRows] = HostArray::of<int32_t>(
          {DType::s32, {n}}, std::vector<int32_t>(static_cast<size_t>(n), static_cast<int32_t>(length)));
    x = repeat ? repeated(x, most / length) : padded(x, most);
  }
}

}  // namespace md
