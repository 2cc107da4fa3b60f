// Checks that everything named in docs/dev/keys.md, docs/dev/checklist.md and the pages of docs/ exists: keys, files,
// functions, tests, headings. docs/keys.md must equal the program's output.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "maxdiffusion/base/version.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;
using Row = std::vector<std::string>;                                // cells
using Reader = std::function<std::string(const std::string& path)>;  // "" if the file does not exist

const std::string kRoot = MD_SOURCE_DIR "/";

std::string read_source(const std::string& path) {
  for (const char* folder : {"", "maxdiffusion/"})
    if (fs::is_regular_file(kRoot + folder + path)) return read_file(kRoot + folder + path);
  return "";
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

/// The rows of every table whose header starts with `first`.
std::vector<Row> rows_of(const std::string& markdown, const std::string& first) {
  std::vector<Row> out;
  bool inside = false;
  for (const std::string& line : lines_of(markdown)) {
    if (!line.starts_with("|")) {
      inside = false;
      continue;
    }
    Row cells;
    std::istringstream parts(line.substr(1));
    for (std::string cell; std::getline(parts, cell, '|');) {
      const size_t begin = cell.find_first_not_of(' '), end = cell.find_last_not_of(' ');
      cells.push_back(begin == std::string::npos ? "" : cell.substr(begin, end - begin + 1));
    }
    if (!inside)
      inside = cells[0] == first;
    else if (!cells[0].starts_with("---"))
      out.push_back(cells);
  }
  return out;
}

std::vector<std::string> code_of(const std::string& cell) {
  std::vector<std::string> out;
  static const std::regex code("`([^`]+)`");
  for (std::sregex_iterator i(cell.begin(), cell.end(), code), end; i != end; ++i) out.push_back((*i)[1]);
  return out;
}

/// Position of a whole word or phrase in a text, not inside a longer word; npos if there is none.
size_t find_word(const std::string& text, const std::string& word) {
  auto letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at)
    if ((at == 0 || !letter(text[at - 1])) && (at + word.size() == text.size() || !letter(text[at + word.size()])))
      return at;
  return std::string::npos;
}
bool says(const std::string& text, const std::string& word) { return find_word(text, word) != std::string::npos; }

/// All definitions of a function or class of this name: from an unindented line with the name to the next unindented
/// line that closes a brace.
std::string definitions(const std::string& source, const std::string& name) {
  std::string out;
  bool inside = false;
  for (const std::string& line : lines_of(source)) {
    const bool margin = !line.empty() && line[0] != ' ' && line[0] != '/' && line[0] != '#';
    if (margin && line[0] != '}' && !line.ends_with(";"))
      inside = says(line, name) &&
               (line.find(name + "(") != std::string::npos || says(line, "class") || says(line, "struct"));
    if (inside) out += line + "\n";
    if (margin && line[0] == '}') inside = false;
  }
  return out;
}

/// Expands "S4-2, S4-7…9, P-1" to single ids.
std::vector<std::string> ids_of(const std::string& cell) {
  std::vector<std::string> out;
  static const std::regex range("(S[0-9]-|P-)([0-9]+)(?:…([0-9]+))?");
  for (std::sregex_iterator i(cell.begin(), cell.end(), range), end; i != end; ++i) {
    const int first = std::stoi((*i)[2]), last = (*i)[3].matched ? std::stoi((*i)[3]) : first;
    for (int n = first; n <= last; ++n) out.push_back((*i)[1].str() + std::to_string(n));
  }
  return out;
}

/// Tests by name ("Suite.Name"), with the rows of docs/dev/checklist.md that each one proves. The rows stand in a
/// comment directly above the test that holds nothing else: "// S4-2, S4-7…9".
using Tests = std::map<std::string, Names>;

Tests tests_in(const std::string& source) {
  Tests out;
  static const std::regex test(R"(TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\).*)"), rows("// (?:S[0-9]|P)-[0-9].*");
  Names above;
  std::smatch m;
  std::string held;  // a name broken after its suite
  for (const std::string& line : lines_of(source)) {
    held = held.empty() ? line : held + line;
    if (held.starts_with("TEST") && held.find(')') == held.npos) continue;
    if (std::regex_match(held, m, test)) out[m[1].str() + "." + m[2].str()] = std::exchange(above, {});
    if (std::regex_match(held, rows))
      for (const std::string& id : ids_of(held)) above.insert(id);
    else if (!held.starts_with("//"))
      above.clear();
    held.clear();
  }
  return out;
}

const Tests& all_tests() {
  static const Tests all = [] {
    Tests tests;
    for (const char* folder : {"tests", "maxdiffusion"})
      for (const auto& f : fs::recursive_directory_iterator(kRoot + folder))
        if (f.path().string().ends_with("_test.cc")) tests.merge(tests_in(read_file(f.path())));
    return tests;
  }();
  return all;
}

/// The tests that a cell names; returns an error for each that does not exist.
std::vector<std::string> check_tests(const std::string& where, const std::string& cell, const Tests& tests) {
  std::vector<std::string> faults;
  for (const std::string& name : code_of(cell))
    if (!tests.contains(name)) faults.push_back(where + ": there is no test " + name);
  return faults;
}

/// docs/dev/keys.md: every declared key must have one row; each row must name tests, and functions that read its keys.
std::vector<std::string> check_keys(const std::string& markdown, const Names& declared, const Tests& tests,
                                    const Reader& read) {
  std::vector<std::string> faults;
  Names seen;
  for (const Row& row : rows_of(markdown, "key")) {
    if (row.size() != 3) {
      faults.push_back(row[0] + ": a row has three cells");
      continue;
    }
    const std::vector<std::string> keys = code_of(row[0]);
    Names unread(keys.begin(), keys.end());
    for (const std::string& key : keys) {
      if (!declared.contains(key)) faults.push_back("there is no key " + key);
      if (!seen.insert(key).second) faults.push_back(key + " has two rows");
    }
    for (const std::string& place : code_of(row[1])) {
      const size_t colon = place.find(": ");
      const std::string source = colon == std::string::npos ? "" : read(place.substr(0, colon));
      if (source.empty()) {
        faults.push_back(row[0] + ": there is no file and function " + place);
        continue;
      }
      const std::string body = definitions(source, place.substr(colon + 2));
      bool any = false;
      for (const std::string& key : keys)
        if (says(body, key)) unread.erase(key), any = true;
      if (!any) faults.push_back(row[0] + ": " + place + " does not mention it");
    }
    if (row[1] != "nothing")
      for (const std::string& key : unread) faults.push_back("no function is named that reads " + key);
    if (code_of(row[2]).empty()) faults.push_back(row[0] + ": no test is named");
    for (const std::string& fault : check_tests(row[0], row[2], tests)) faults.push_back(fault);
  }
  for (const std::string& key : declared)
    if (!seen.contains(key)) faults.push_back(key + " has no row");
  return faults;
}

/// GitHub's anchors of the headings.
Names anchors_of(const std::string& markdown) {
  Names out;
  for (const std::string& line : lines_of(markdown)) {
    if (!line.starts_with("#")) continue;
    std::string anchor;
    for (char c : line.substr(line.find_first_not_of("# "))) {
      if (c == ' ') anchor += '-';
      if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_')
        anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    out.insert(anchor);
  }
  return out;
}

/// How a row is proved: by tests, a document, or not yet.
struct Proof {
  std::vector<std::string> tests;
  int headings = 0;
  bool not_yet = false;
};

Proof proof_of(const std::string& cell) {
  static const std::regex link(R"(\]\([\w./]+#[\w-]+\))"), excuse("not yet: ...");
  return {.tests = code_of(cell),
          .headings = static_cast<int>(std::distance(std::sregex_iterator(cell.begin(), cell.end(), link), {})),
          .not_yet = std::regex_search(cell, excuse)};
}

bool names(const Tests& tests, const std::string& test, const std::string& id) {
  const auto it = tests.find(test);
  return it != tests.end() && it->second.contains(id);
}

/// docs/dev/checklist.md: every expected id must occur once; each row must have a test, a link to a heading, or "not
/// yet: …". A row and the tests it cites must name each other.
std::vector<std::string> check_checklist(const std::string& markdown, const Names& expected, const Tests& tests,
                                         const Reader& read_doc) {
  std::vector<std::string> faults;
  std::map<std::string, int> seen;
  std::set<std::pair<std::string, std::string>> cited;  // test, id
  for (const Row& row : rows_of(markdown, "row")) {
    const std::vector<std::string> ids = ids_of(row[0]);
    const Proof proof = proof_of(row.back());
    for (const std::string& fault : check_tests(row[0], row.back(), tests)) faults.push_back(fault);
    for (const std::string& test : proof.tests)
      if (tests.contains(test) && std::ranges::none_of(ids, [&](const auto& id) { return names(tests, test, id); }))
        faults.push_back(row[0] + ": " + test + " does not name it");
    for (const std::string& id : ids) {
      ++seen[id];
      for (const std::string& test : proof.tests) cited.emplace(test, id);
      if (!proof.tests.empty() && proof.headings == 0 && !proof.not_yet &&
          std::ranges::none_of(proof.tests, [&](const auto& test) { return names(tests, test, id); }))
        faults.push_back(id + ": none of the tests that its row cites names it");
    }
    static const std::regex link(R"(\]\(([\w./]+)#([\w-]+)\))");
    for (std::sregex_iterator i(row.back().begin(), row.back().end(), link), end; i != end; ++i)
      if (!anchors_of(read_doc((*i)[1])).contains((*i)[2]))
        faults.push_back(row[0] + ": there is no heading " + (*i)[1].str() + "#" + (*i)[2].str());
    if (row.size() != 3 || (proof.tests.empty() && proof.headings == 0 && !proof.not_yet))
      faults.push_back(row[0] + ": has neither test nor heading nor \"not yet: …\"");
  }
  for (const auto& [test, ids] : tests)
    for (const std::string& id : ids)
      if (!cited.contains({test, id})) faults.push_back(test + " names " + id + ", whose row does not cite it");
  for (const std::string& id : expected)
    if (seen[id] != 1) faults.push_back(id + " has " + std::to_string(seen[id]) + " rows");
  for (const auto& [id, n] : seen)
    if (id.starts_with("P-") ? n != 1 : !expected.contains(id)) faults.push_back(id + " is no row of the checklist");
  return faults;
}

/// The summary at the head of docs/dev/checklist.md: how many rows are proved in which way.
std::string states_of(const std::string& markdown, const Tests& tests) {
  int proved = 0, in_part = 0, stated = 0, not_yet = 0, without_source = 0;
  for (const Row& row : rows_of(markdown, "row")) {
    const Proof proof = proof_of(row.back());
    for (const std::string& id : ids_of(row[0])) {
      const bool tested = std::ranges::any_of(proof.tests, [&](const auto& test) { return names(tests, test, id); });
      ++(id.starts_with("P-") ? without_source
         : tested             ? (proof.not_yet ? in_part : proved)
         : proof.not_yet      ? not_yet
                              : stated);
    }
  }
  return fmt::format(
      "{} rows: {} are proved by tests, {} in part, {} are words of a document, {} are not yet; and {} rows of "
      "this project's own.\n",
      proved + in_part + stated + not_yet, proved, in_part, stated, not_yet, without_source);
}

std::string joined(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

Names declared_keys() {
  Names out;
  for (const std::string& line : lines_of(maxdiffusion({"inspect", "keys"}).out))
    out.insert(line.substr(0, line.find(':')));
  return out;
}

/// README.md, the other top-level documents, and the pages of docs/, by path.
std::map<std::string, std::string> documents() {
  std::map<std::string, std::string> out;
  for (const char* page : {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"})
    out[page] = read_file(kRoot + page);
  for (const auto& f : fs::recursive_directory_iterator(kRoot + "docs"))
    if (f.path().extension() == ".md") out[fs::relative(f.path(), kRoot)] = read_file(f.path());
  return out;
}

TEST(Docs, TheReferenceOfKeysIsWhatTheProgramPrints) {
  const std::string path = kRoot + "docs/keys.md", page = maxdiffusion({"inspect", "keys", "--markdown"}).out;
  if (std::getenv("MD_UPDATE_DOCS")) write_file_atomic(path, page);
  EXPECT_TRUE(read_file(path) == page) << "docs/keys.md is not what `inspect keys --markdown` prints; "
                                          "MD_UPDATE_DOCS=1 writes it";
  for (const std::string& key : declared_keys()) EXPECT_TRUE(contains(page, "| `" + key + "` |")) << key;
}

TEST(Docs, EveryKeyHasARowWithItsReaderAndItsTest) {
  const Names keys = declared_keys();
  EXPECT_GT(keys.size(), 150u);
  EXPECT_EQ(joined(check_keys(read_file(kRoot + "docs/dev/keys.md"), keys, all_tests(), read_source)), "");
}

TEST(Docs, EveryRowOfTheChecklistHasAProofOrSaysThatItHasNone) {
  Names expected;
  for (const auto& [document, rows] : {std::pair{"S0-", 102}, {"S1-", 57}, {"S2-", 120}, {"S3-", 31}, {"S4-", 107}})
    for (int n = 1; n <= rows; ++n) expected.insert(document + std::to_string(n));
  EXPECT_EQ(joined(check_checklist(read_file(kRoot + "docs/dev/checklist.md"), expected, all_tests(),
                                   [](const std::string& file) { return read_source("docs/dev/" + file); })),
            "");
}

TEST(Docs, TheChecklistCountsItsRowsByState) {
  const std::string path = kRoot + "docs/dev/checklist.md", line = states_of(read_file(path), all_tests());
  if (std::getenv("MD_UPDATE_DOCS")) {
    static const std::regex old("\\n[0-9]+ rows: [^\n]*\n");
    write_file_atomic(path, std::regex_replace(read_file(path), old, "\n" + line));
  }
  EXPECT_TRUE(contains(read_file(path), "\n" + line)) << line << "MD_UPDATE_DOCS=1 writes it";
}

TEST(Docs, KeysInTheTextExist) {
  Names keys = {"key", "load_into_transformer_2"};  // a placeholder for any key, and one of diffusers
  for (const Row& row : rows_of(read_file(kRoot + "docs/keys.md"), "key"))  // keys of configs and of commands
    for (const std::string& key : code_of(row[0])) keys.insert(key);
  int found = 0;
  for (const auto& [file, text] : documents()) {
    bool block = false;
    for (const std::string& line : lines_of(text)) {
      if (line.starts_with("```")) block = !block;
      for (const std::string& code : block ? std::vector{line} : code_of(line)) {
        static const std::regex setting("(?:^| )([a-z][a-z0-9_]*)=");
        for (std::sregex_iterator i(code.begin(), code.end(), setting), end; i != end; ++i, ++found)
          EXPECT_TRUE(keys.contains((*i)[1])) << file << ": " << (*i)[1] << " in " << code;
      }
    }
    if (file.ends_with("/keys.md")) continue;  // other tests check them
    for (const Row& row : rows_of(text, "key"))
      for (const std::string& key : code_of(row[0]))
        EXPECT_TRUE(keys.contains(key.substr(0, key.find('=')))) << file << ": " << key;
  }
  EXPECT_GT(found, 250);
}

TEST(Docs, LinksLeadToFilesAndHeadings) {
  int found = 0;
  for (const auto& [file, text] : documents()) {
    const fs::path page = kRoot + file;
    static const std::regex link(R"(\]\(([^)#\s]*)(?:#([\w-]+))?\))");
    for (std::sregex_iterator i(text.begin(), text.end(), link), end; i != end; ++i, ++found) {
      const std::string to = (*i)[1].str(), heading = (*i)[2].str();
      if (to.starts_with("https://")) continue;
      const fs::path target = to.empty() ? page : page.parent_path() / to;
      ASSERT_TRUE(fs::exists(target)) << file << ": " << to;
      if (!heading.empty()) {
        EXPECT_TRUE(anchors_of(read_file(target)).contains(heading)) << file << ": " << to << "#" << heading;
      }
    }
  }
  EXPECT_GT(found, 150);
}

TEST(Docs, TablesOfFiguresNameTheCommandThatPrintsThem) {
  int tables = 0;
  for (const auto& [file, text] : documents()) {
    if (file != "docs/performance.md" && file != "docs/scale.md") continue;
    std::string heading;
    bool figures = false, command = false;
    auto check = [&, page = file] {
      EXPECT_TRUE(command || !figures) << page << ": " << heading;
      tables += figures, figures = command = false;
    };
    for (const std::string& line : lines_of(text)) {
      if (line.starts_with("#")) check(), heading = line;
      figures |= line.starts_with("|") && line.find_first_of("0123456789") != std::string::npos;
      command |= contains(line, "./run ") || contains(line, "bench/");
    }
    check();
  }
  EXPECT_GT(tables, 10);
}

/// A source in which adjacent string literals are joined and \" is replaced by ".
std::string with_joined_literals(const std::string& source) {
  std::string out;
  for (size_t at = 0; at < source.size(); ++at) {
    const size_t next = source[at] == '"' ? source.find_first_not_of(" \n", at + 1) : std::string::npos;
    if (next != std::string::npos && source[next] == '"' && source.find('\n', at) < next)
      at = next;
    else if (source[at] != '\\')
      out += source[at];
  }
  return out;
}

/// Parts of the messages in docs/troubleshooting.md, split at …, that no source prints.
std::vector<std::string> check_messages(const std::string& markdown, const std::string& sources) {
  std::vector<std::string> faults;
  for (const Row& row : rows_of(markdown, "message"))
    for (const std::string& message : code_of(row[0])) {
      std::string rest = message;
      while (!rest.empty()) {
        const size_t cut = std::min(rest.find("…"), rest.size());
        const std::string part = rest.substr(0, cut);
        if (!contains(sources, part)) faults.push_back(message + ": no source prints '" + part + "'");
        rest = rest.substr(std::min(cut + std::string("…").size(), rest.size()));
      }
    }
  return faults;
}

std::string trimmed(const std::string& line) {
  const size_t begin = line.find_first_not_of(' ');
  return begin == std::string::npos ? "" : line.substr(begin);
}

/// Checks blocks of C++ whose first line names a file ("// examples/generate.cc"): returns lines that do not follow
/// each other in that file. `…` marks an allowed gap.
std::vector<std::string> check_quotes(const std::string& page, const Reader& read, int* blocks) {
  std::vector<std::string> faults, source;
  size_t at = 0;
  bool inside = false, gap = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) {
      inside = line == "```cpp", source.clear();
      continue;
    }
    if (!inside) continue;
    const std::string expected = trimmed(line);
    if (source.empty()) {
      source = lines_of(line.starts_with("// ") ? read(line.substr(3)) : "");
      if (source.empty()) faults.push_back("the first line of a block names no file: " + line), inside = false;
      at = 0, gap = true, ++*blocks;
    } else if (expected == "…") {
      gap = true;
    } else {
      const auto same = [&](const std::string& s) { return trimmed(s) == expected; };
      const auto from = source.begin() + static_cast<std::ptrdiff_t>(at),
                 found = std::find_if(from, source.end(), same);
      if (found == source.end() || (found != from && !gap)) {
        faults.push_back("it does not stand there: " + line), inside = false;
        continue;
      }
      at = static_cast<size_t>(found - source.begin()) + 1, gap = false;
    }
  }
  return faults;
}

TEST(Docs, QuotedCodeStandsInTheFilesThatItNames) {
  int blocks = 0;
  for (const auto& [file, text] : documents()) EXPECT_EQ(joined(check_quotes(text, read_source, &blocks)), "") << file;
  EXPECT_GT(blocks, 10);
}

TEST(Docs, TheMessagesOfTroubleshootingArePrinted) {
  std::string sources;
  for (const char* folder : {"maxdiffusion", "apps"})
    for (const auto& f : fs::recursive_directory_iterator(kRoot + folder))
      if (f.path().extension() == ".cc" && !f.path().string().ends_with("_test.cc"))
        sources += with_joined_literals(read_file(f.path()));
  const std::string page = read_file(kRoot + "docs/troubleshooting.md");
  EXPECT_GT(rows_of(page, "message").size(), 40u);
  EXPECT_EQ(joined(check_messages(page, sources)), "");
}

// The checks above must be able to fail.

const std::string kSource =
    "#include <a>\nint other(const C& c) {\n  return c.seed;\n}\n\nstd::string f(const C& c,\n              int b) {\n"
    "  return c.run_name;\n}\nclass Phase {\n  int g() { return c.rate; }\n};\n";
std::string one_file(const std::string& path) { return path == "a.cc" ? kSource : ""; }

TEST(Docs, TheChangelogHasAHeadingForThisVersion) {
  const std::vector<std::string> lines = lines_of(read_file(kRoot + "CHANGELOG.md"));
  EXPECT_TRUE(std::ranges::any_of(lines, [](const std::string& line) {
    return line.starts_with("## ") && line.ends_with(std::string(" ") + version());
  }));
}

TEST(Docs, TheLicenceIsNamedByItsIdentifier) {
  EXPECT_TRUE(read_file(kRoot + "LICENSE").starts_with("SPDX-License-Identifier: Apache-2.0\n"));
}

/// Contents of tests/cli/words_out_of_use.txt; that file explains its lines.
struct WordsOutOfUse {
  std::map<std::string, std::string> instead;              // of each word or phrase
  std::map<std::string, std::string> identifiers;          // names in sources
  std::vector<std::pair<std::string, std::string>> allow;  // file or folder, text
};
WordsOutOfUse read_words(const std::string& text) {
  WordsOutOfUse out;
  for (const std::string& line : lines_of(text)) {
    if (line.empty() || line.starts_with("#")) continue;
    const size_t colon = line.find(": ");
    if (constexpr std::string_view kAllow = "allow "; line.starts_with(kAllow)) {
      const size_t bar = line.find(" | ");
      out.allow.emplace_back(line.substr(kAllow.size(), colon - kAllow.size()),
                             line.substr(colon + 2, bar - colon - 2));
      continue;
    }
    constexpr std::string_view kIdentifier = "identifier ";
    const bool identifier = line.starts_with(kIdentifier);
    std::istringstream words(
        line.substr(identifier ? kIdentifier.size() : 0, colon - (identifier ? kIdentifier.size() : 0)));
    for (std::string word; std::getline(words, word, ',');)
      (identifier ? out.identifiers : out.instead)[trimmed(word)] = line.substr(colon + 2);
  }
  return out;
}
const WordsOutOfUse& words_out_of_use() {
  static const WordsOutOfUse words = read_words(read_file(kRoot + "tests/cli/words_out_of_use.txt"));
  return words;
}

/// Lower-cases the text and replaces blanks, line ends and comment slashes between lines by one space.
std::string as_words(const std::string& text) {
  std::string out;
  for (const std::string& line : lines_of(text)) {
    std::string rest = trimmed(line);
    for (const char* begin : {"///", "//"})
      if (rest.starts_with(begin)) rest = trimmed(rest.substr(std::string(begin).size()));
    for (char c : rest + " ") {
      c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      if (c != ' ' || !out.ends_with(' ')) out += c;
    }
  }
  return out;
}

/// Words of a file's text that are out of use, each with its replacement and context.
std::vector<std::string> bad_words(const std::string& file, const std::string& text, const WordsOutOfUse& words) {
  std::string rest = as_words(text);
  for (const auto& [place, allowed] : words.allow) {
    const std::string part = as_words(allowed).substr(0, allowed.size());  // without the trailing blank
    for (size_t at; file.starts_with(place) && (at = rest.find(part)) != rest.npos;) rest.replace(at, part.size(), "…");
  }
  std::vector<std::string> found;
  for (const auto& [word, instead] : words.instead)
    if (const size_t at = find_word(rest, word); at != rest.npos) {
      const size_t from = at < 40 ? 0 : at - 40;
      found.push_back(
          fmt::format("{}: '{}' in '…{}…'; say: {}", file, word, rest.substr(from, 80 + word.size()), instead));
    }
  return found;
}

/// The string literals of a source, one per line, with adjacent ones joined; and its code, with literals replaced by ""
/// and without comments.
struct SourceText {
  std::string literals, code;
};
SourceText split_source(const std::string& source) {
  SourceText out;
  bool after_literal = false;
  for (size_t i = 0; i < source.size(); ++i) {
    const char c = source[i];
    if (source.compare(i, 2, "//") == 0) {
      i = std::min(source.find('\n', i), source.size());
      out.code += '\n';
    } else if (source.compare(i, 2, "/*") == 0) {
      i = std::min(source.find("*/", i), source.size() - 1) + 1;
    } else if (c == '\'' && (i == 0 || !std::isxdigit(static_cast<unsigned char>(source[i - 1])))) {
      for (++i; i < source.size() && source[i] != '\''; ++i)
        if (source[i] == '\\') ++i;
      out.code += "''";
      after_literal = false;
    } else if (c == '"' && i > 0 && source[i - 1] == 'R') {
      const size_t open = source.find('(', i);
      const std::string close = ")" + source.substr(i + 1, open - i - 1) + "\"";
      const size_t end = source.find(close, open);
      out.literals += source.substr(open + 1, end - open - 1) + "\n";
      out.code += "\"\"";
      i = end + close.size() - 1;
    } else if (c == '"') {
      if (after_literal) out.literals.pop_back();
      for (++i; i < source.size() && source[i] != '"'; ++i) {
        if (source[i] == '\\') ++i;
        out.literals += source[i];
      }
      out.code += "\"\"";
      out.literals += '\n', after_literal = true;
    } else {
      out.code += c;
      if (!std::isspace(static_cast<unsigned char>(c))) after_literal = false;
    }
  }
  return out;
}

/// Lines of a source with an identifier that is out of use, each with its replacement.
std::vector<std::string> bad_identifiers(const std::string& file, const std::string& source,
                                         const WordsOutOfUse& words) {
  std::vector<std::string> found;
  for (const std::string& line : lines_of(split_source(source).code))
    for (const auto& [name, instead] : words.identifiers)
      if (find_word(line, name) != line.npos)
        found.push_back(fmt::format("{}: identifier '{}' in '{}'; name it: {}", file, name, trimmed(line), instead));
  return found;
}

TEST(Docs, HelpAndKeysUseTheWordsOfTheField) {
  std::string text = read_file(kRoot + "run").substr(0, 6000) + maxdiffusion({"help"}).out;
  for (const char* command : {"train", "generate", "convert", "lora", "prepare_emoji", "prepare_moving_emoji"})
    text += maxdiffusion({"help", command}).out;
  EXPECT_GT(lines_of(text).size(), 400u);
  EXPECT_EQ(joined(bad_words("help", text, words_out_of_use())), "");
}

TEST(Docs, PagesHeadersAndMessagesUseTheWordsOfTheField) {
  const WordsOutOfUse& words = words_out_of_use();
  EXPECT_GT(words.instead.size(), 40u);
  std::map<std::string, std::string> texts = documents();
  texts.erase("CHANGELOG.md");  // history
  for (const char* folder : {"maxdiffusion", "apps"})
    for (const auto& f : fs::recursive_directory_iterator(kRoot + folder)) {
      const std::string file = fs::relative(f.path(), kRoot);
      if (file.ends_with(".h")) texts[file] = read_file(f.path());
      if (file.ends_with(".cc") && !file.ends_with("_test.cc"))
        texts[file] = split_source(read_file(f.path())).literals;
    }
  EXPECT_GT(texts.size(), 500u);
  std::vector<std::string> found;
  for (const auto& [file, text] : texts)
    for (const std::string& fault : bad_words(file, text, words)) found.push_back(fault);
  EXPECT_EQ(joined(found), "");
}

TEST(Docs, SourcesUseNoIdentifierThatIsOutOfUse) {
  const WordsOutOfUse& words = words_out_of_use();
  EXPECT_GT(words.identifiers.size(), 3u);
  std::vector<std::string> found;
  size_t sources = 0;
  for (const char* folder : {"maxdiffusion", "apps", "tests", "bench", "examples"})
    for (const auto& f : fs::recursive_directory_iterator(kRoot + folder)) {
      const std::string file = fs::relative(f.path(), kRoot);
      if (!file.ends_with(".h") && !file.ends_with(".cc")) continue;
      ++sources;
      for (const std::string& fault : bad_identifiers(file, read_file(f.path()), words)) found.push_back(fault);
    }
  EXPECT_GT(sources, 800u);
  EXPECT_EQ(joined(found), "");
}

TEST(DocsCheck, IdentifiersOutOfUseAreNamed) {
  const WordsOutOfUse words = read_words("identifier given, own: what it is\ndrawn: sampled\n");
  EXPECT_EQ(words.identifiers.size(), 2u);
  EXPECT_EQ(words.instead.size(), 1u);
  const auto found = [&](const char* source) { return joined(bad_identifiers("a.cc", source, words)); };
  EXPECT_TRUE(found("int a = own;  // b\n").starts_with("a.cc: identifier 'own' in 'int a = own;"));
  EXPECT_TRUE(found("int a = own;").ends_with("name it: what it is\n"));
  EXPECT_TRUE(contains(found("f(x.given(1));"), "'given'"));
  EXPECT_EQ(found("// own\n/* given */ f(\"own\", R\"(given)\", own_rows, is_given, drawn); int owner, Own;"), "");
}

TEST(DocsCheck, WordsOutOfUseAreNamed) {
  const WordsOutOfUse words = read_words(
      "# words\ndraw, goes on: generate\npieces: shards\nallow a.h: pieces of eight | a reason\nallow b/: draw | b\n");
  EXPECT_EQ(words.instead.size(), 3u);
  const auto found = [&](const char* file, const char* text) { return joined(bad_words(file, text, words)); };
  EXPECT_EQ(found("a.md", "generate images\nDraw them\n"),
            joined({"a.md: 'draw' in '…generate images draw them …'; say: generate"}));
  EXPECT_TRUE(contains(found("a.h", "/// A run goes\n  /// on.\n"), "'goes on'"));
  EXPECT_EQ(found("a.md", "withdraw what undergoes only drawers\n"), "");
  EXPECT_EQ(found("a.h", "Pieces of eight\n"), "");
  EXPECT_TRUE(contains(found("b.h", "pieces of eight\n"), "'pieces'"));
  EXPECT_EQ(found("b/c.h", "draw\n"), "");
  EXPECT_EQ(split_source("// \"a\"\nf('\"', \"b \"\n  \"c\\\"d\"); /* \"e\" */ g(\"h\", R\"x(i\")x\");").literals,
            "b c\"d\nh\ni\"\n");
}

TEST(DocsCheck, DefinitionsAreFoundAtTheMargin) {
  EXPECT_EQ(definitions(kSource, "other"), "int other(const C& c) {\n  return c.seed;\n}\n");
  EXPECT_TRUE(says(definitions(kSource, "f"), "run_name"));
  EXPECT_FALSE(says(definitions(kSource, "f"), "seed"));
  EXPECT_TRUE(says(definitions(kSource, "Phase"), "rate"));
  EXPECT_EQ(definitions(kSource, "g"), "");
}

TEST(DocsCheck, KeysThatDoNotFitAreNamed) {
  const Names keys = {"run_name", "seed"};
  const Tests tests = {{"A.B", {}}};
  auto faults = [&](const std::string& rows) {
    return joined(check_keys("| key | read by | proof |\n| --- | --- | --- |\n" + rows, keys, tests, one_file));
  };
  const std::string good = "| `run_name` | `a.cc: f` | `A.B` |\n", seed = "| `seed` | `a.cc: other` | `A.B` |\n";
  EXPECT_EQ(faults(good + seed), "");
  EXPECT_EQ(faults(good), "seed has no row\n");
  EXPECT_EQ(faults(good + good + seed), "run_name has two rows\n");
  EXPECT_EQ(faults(good + seed + "| `rate` | `a.cc: Phase` | `A.B` |\n"), "there is no key rate\n");
  EXPECT_EQ(faults(good + "| `seed` | `b.cc: other` | `A.B` |\n"),
            "`seed`: there is no file and function b.cc: other\nno function is named that reads seed\n");
  EXPECT_EQ(faults(good + "| `seed` | `a.cc: f` | `A.B` |\n"),
            "`seed`: a.cc: f does not mention it\nno function is named that reads seed\n");
  EXPECT_EQ(faults(good + "| `seed` | `a.cc: other` | `A.C` |\n"), "`seed`: there is no test A.C\n");
  EXPECT_EQ(faults(good + "| `seed` | `a.cc: other` | |\n"), "`seed`: no test is named\n");
  EXPECT_EQ(faults(good + "| `seed` | nothing | `A.B` |\n"), "");
}

TEST(DocsCheck, TestsNameTheirRowsRightAboveThem) {
  EXPECT_EQ(tests_in("// S1-1, S2-3…4\nTEST(A, B) { x(); }\n\n// Of S1-2.\n// P-1\n// more\nTEST_F(C,\n       D) {\n}\n"
                     "// S1-5\n\nTEST(E, F) {\n  // S1-6\n}\n"),
            (Tests{{"A.B", {"S1-1", "S2-3", "S2-4"}}, {"C.D", {"P-1"}}, {"E.F", {}}}));
}

const std::string kRows = "| row | what | proof |\n| --- | --- | --- |\n";

TEST(DocsCheck, RowsWithoutProofAreNamed) {
  const Tests both = {{"A.B", {"S1-1", "S1-2"}}}, first = {{"A.B", {"S1-1"}}}, none = {{"A.B", {}}};
  auto faults = [&](const std::string& rows, const Tests& tests) {
    return joined(check_checklist(kRows + rows, {"S1-1", "S1-2"}, tests,
                                  [](const std::string& file) { return file == "a.md" ? "# Of it, all\n" : ""; }));
  };
  EXPECT_EQ(faults("| S1-1…2 | x | `A.B` |\n", both), "");
  EXPECT_EQ(faults("| S1-1, S1-2 | x | not yet: hardware |\n", none), "");
  EXPECT_EQ(faults("| S1-1 | x | [a](a.md#of-it-all) |\n| S1-2 | x | `A.B` |\n", {{"A.B", {"S1-2"}}}), "");
  EXPECT_EQ(faults("| S1-1…2 | x | `A.B`; not yet: more |\n", first), "");
  EXPECT_EQ(faults("| S1-1 | x | `A.B` |\n", first), "S1-2 has 0 rows\n");
  EXPECT_EQ(faults("| S1-1…3 | x | [a](a.md#of-it-all) |\n", none), "S1-3 is no row of the checklist\n");
  EXPECT_EQ(faults("| S1-1…2 | x | `A.C`; not yet: more |\n", none), "S1-1…2: there is no test A.C\n");
  EXPECT_EQ(faults("| S1-1…2 | x | [a](a.md#of-nothing) |\n", none), "S1-1…2: there is no heading a.md#of-nothing\n");
  EXPECT_EQ(faults("| S1-1…2 | x | ok |\n", none), "S1-1…2: has neither test nor heading nor \"not yet: …\"\n");
  // Citations go both ways.
  EXPECT_EQ(faults("| S1-1…2 | x | `A.B`, [a](a.md#of-it-all) |\n", none), "S1-1…2: A.B does not name it\n");
  EXPECT_EQ(faults("| S1-1…2 | x | `A.B` |\n", first), "S1-2: none of the tests that its row cites names it\n");
  EXPECT_EQ(faults("| S1-1 | x | `A.B` |\n| S1-2 | x | [a](a.md#of-it-all) |\n", both),
            "A.B names S1-2, whose row does not cite it\n");
}

TEST(DocsCheck, MessagesThatAreNotPrintedAreNamed) {
  const std::string source = with_joined_literals("f(\"the size \"\n  \"is {}; \\\"x\\\"\"); g(\"a\", \"b\")");
  EXPECT_EQ(source, "f(\"the size is {}; \"x\"\"); g(\"a\", \"b\")");
  const std::string head = "| message | cause |\n| --- | --- |\n";
  EXPECT_EQ(joined(check_messages(head + "| `the size is …; \"x\"`, `a` | |\n", source)), "");
  EXPECT_EQ(joined(check_messages(head + "| `a` | |\n| `the size … ab` | |\n", source)),
            "the size … ab: no source prints ' ab'\n");
}

TEST(DocsCheck, QuotesThatDoNotStandInTheirFileAreNamed) {
  const Reader file = [](const std::string& path) { return path == "a.cc" ? "a\n  b\n  c\nd\n" : ""; };
  int blocks = 0;
  auto faults = [&](const std::string& code) {
    return joined(check_quotes("```cpp\n" + code + "```\n", file, &blocks));
  };
  EXPECT_EQ(faults("// a.cc\na\n  b\n…\nd\n"), "");
  EXPECT_EQ(faults("// a.cc\nb\nc\n"), "");
  EXPECT_EQ(faults("// a.cc\na\nc\n"), "it does not stand there: c\n");
  EXPECT_EQ(faults("// a.cc\nb\n…\na\n"), "it does not stand there: a\n");
  EXPECT_EQ(faults("// b.cc\na\n"), "the first line of a block names no file: // b.cc\n");
  EXPECT_EQ(faults("a\n"), "the first line of a block names no file: a\n");
}

TEST(DocsCheck, RowsAreCountedByState) {
  EXPECT_EQ(
      states_of(kRows + "| S1-1 | x | `A.B` |\n| S1-2…3 | x | `A.B`; not yet: more |\n| S1-4 | x | [a](a.md#b) |\n"
                        "| S1-5…7 | x | not yet: hardware |\n| P-1 | x | `A.B` |\n",
                {{"A.B", {"S1-1", "S1-2", "P-1"}}}),
      "7 rows: 1 are proved by tests, 1 in part, 1 are words of a document, 4 are not yet; and 1 rows of this "
      "project's "
      "own.\n");
}

}  // namespace
}  // namespace md
