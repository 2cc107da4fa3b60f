#include "tests/fuzz/mutate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>

namespace md {
namespace {

size_t below(Random& r, size_t n) { return n == 0 ? 0 : r() % n; }

bool is_text(const std::string& s) {
  return std::all_of(s.begin(), s.begin() + static_cast<long>(std::min<size_t>(s.size(), 64)),
                     [](unsigned char c) { return c >= 32 || c == '\n' || c == '\r' || c == '\t'; });
}

/// Replaces a run of characters at or after a random position that satisfy `is` by one of `choices` texts in `with`.
template <class Is>
bool replace_run(std::string& s, Random& r, Is is, const char* const* with, size_t choices) {
  const auto start = std::find_if(s.begin() + static_cast<long>(below(r, s.size())), s.end(), is);
  if (start == s.end()) return false;
  const auto end = std::find_if_not(start, s.end(), is);
  s.replace(start, end, with[below(r, choices)]);
  return true;
}

void damage_text(std::string& s, Random& r) {
  static constexpr const char* kNumbers[] = {
      "0",    "-1",    "1",  "100000", "2147483648", "18446744073709551616", "1e999", "-1e-9", "1.5",
      "null", "\"x\"", "[]", "{}",     "true",       "9007199254740993",     "nan"};
  static constexpr const char* kWords[] = {"",      "x",     "null", "false",     "\\u0000",
                                           "../..", "a\xff", "[[[[", "{\"a\":1}", "&a [*a]"};
  const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const auto letter = [](unsigned char c) { return std::isalpha(c) != 0 || c == '_'; };
  if (below(r, 3) != 0 && replace_run(s, r, digit, kNumbers, std::size(kNumbers))) return;
  replace_run(s, r, letter, kWords, std::size(kWords));
}

void damage_bytes(std::string& s, Random& r) {
  const size_t at = below(r, s.size()), part = 1 + below(r, std::min<size_t>(s.size() - at, 64));
  switch (below(r, 7)) {
    case 0: s[at] = static_cast<char>(s[at] ^ (1 << below(r, 8))); return;
    case 1: s[at] = static_cast<char>(r()); return;
    case 2: s.resize(at); return;
    case 3: s.erase(at, part); return;
    case 4: s.insert(below(r, s.size()), s.substr(at, part)); return;
    case 5: {
      std::string bytes(part, '\0');
      for (char& c : bytes) c = static_cast<char>(r());
      s.insert(at, bytes);
      return;
    }
    default: {  // a number where a length or an offset may be
      static constexpr uint64_t kEdges[] = {0,      1,          0x7f,       0xff,  0x7fff,
                                            0xffff, 0x7fffffff, 0xffffffff, ~0ULL, 1ULL << 62};
      const uint64_t edge = kEdges[below(r, std::size(kEdges))];
      std::memcpy(s.data() + at, &edge, std::min<size_t>(size_t{1} << below(r, 4), s.size() - at));
    }
  }
}

}  // namespace

std::string damaged(const std::string& whole, Random& random) {
  std::string s = whole;
  const bool text = is_text(whole);
  for (size_t n = 1 + below(random, 4); n > 0 && !s.empty(); --n) {
    if (text && below(random, 2) == 0)
      damage_text(s, random);
    else
      damage_bytes(s, random);
  }
  return s;
}

std::vector<std::string> hostile_texts() {
  const auto times = [](int n, const std::string& text) {
    std::string all;
    for (int i = 0; i < n; ++i) all += text;
    return all;
  };
  constexpr int kLevels = 100'000;
  std::vector<std::string> out;
  for (const auto& [open, close] : {std::pair("[", "]"), std::pair("{\"a\":", "}"), std::pair("[{\"a\":", "}]"),
                                    std::pair("{a: ", "}"), std::pair("{a=", "}")}) {
    const std::string deep = times(kLevels, open);
    for (const std::string& text : {deep, deep + "1" + times(kLevels, close)})
      for (const char* before : {"", "{\"__metadata__\": ", "{\"_class_name\": ", "a: ", "a = ", "logical_axis_rules=",
                                 "diffusion_scheduler_config="})
        out.push_back(before + text);
  }
  for (const char* open : {"- ", "? ", "a:\n  - ", "!!seq [", "&a ["}) out.push_back(times(kLevels, open) + "x");
  std::string indented, aliases = "a0: &a0 [x, x]\n", nested = "a0: &a0 [x]\n";
  for (int i = 0; i < 1000; ++i) indented += std::string(static_cast<size_t>(i), ' ') + "a:\n";
  for (int i = 1; i < 40; ++i) aliases += fmt::format("a{}: &a{} [*a{}, *a{}]\n", i, i, i - 1, i - 1);
  for (int i = 1; i < 5000; ++i) nested += fmt::format("a{}: &a{} [*a{}]\n", i, i, i - 1);
  out.insert(out.end(), {indented, aliases, nested, "&a [*a]", "a" + times(kLevels, ".a") + " = 1",
                         "[" + times(kLevels, "a.") + "a]", "[[" + times(kLevels, "a.") + "a]]"});
  const size_t texts = out.size();
  for (size_t i = 0; i < texts; ++i) {
    const uint64_t length = out[i].size();
    out.push_back(std::string(reinterpret_cast<const char*>(&length), sizeof length) + out[i]);
  }
  return out;
}

}  // namespace md
