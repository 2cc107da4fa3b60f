// Checks the layering rule: includes and cmake/modules.cmake must stay within the table of docs/design.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;
using Table = std::map<std::string, Names>;  // module → modules it may include

const fs::path kRoot = MD_SOURCE_DIR;

std::string read(const fs::path& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Rows "| `module/` | one line | a, b |" of the table headed "| module | one line | may include |".
Table granted(const std::string& markdown) {
  Table table;
  std::istringstream lines(markdown);
  static const std::regex row(R"(\| `(\w+)/` \|[^|]*\| ([^|]*) \|)");
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line == "| module | one line | may include |") inside = true;
    if (line.empty() || line[0] != '|') inside = false;
    std::smatch m;
    if (!inside || !std::regex_match(line, m, row)) continue;
    static const std::regex word(R"(\w+)");
    std::string names = m[2];
    Names& grants = table[m[1]];
    for (std::sregex_iterator i(names.begin(), names.end(), word), end; i != end; ++i) grants.insert(i->str());
  }
  return table;
}

/// Everything `module` may include: itself, its direct grants, and theirs.
Names reach(const Table& table, const std::string& module) {
  Names seen = {module};
  for (std::vector<std::string> todo = {module}; !todo.empty();) {
    std::string next = todo.back();
    todo.pop_back();
    auto row = table.find(next);
    if (row == table.end()) continue;
    for (const auto& name : row->second) {
      if (seen.insert(name).second) todo.push_back(name);
    }
  }
  return seen;
}

/// The modules that a file includes.
Names included(const std::string& text) {
  Names names;
  static const std::regex include(R"((?:^|\n)\s*#\s*include\s*["<]maxdiffusion/(\w+)/)");
  for (std::sregex_iterator i(text.begin(), text.end(), include), end; i != end; ++i) names.insert((*i)[1].str());
  return names;
}

/// Grants of `module` that none of its files uses; `files`: the modules included by each file.
Names unused(const Table& table, const std::string& module, const std::vector<Names>& files) {
  Names left = table.at(module);
  for (const Names& file : files)
    for (const auto& name : file) left.erase(name);
  return left;
}

/// Forbidden includes of one file of `module`, as "module/…: includes …".
std::vector<std::string> violations(const Table& table, const std::string& module, const std::string& file,
                                    const std::string& text) {
  std::vector<std::string> found;
  Names allowed = reach(table, module);
  std::istringstream lines(text);
  static const std::regex include(R"(\s*#\s*include\s*["<]([^">]+)[">].*)");
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::smatch m;
    if (!std::regex_match(line, m, include)) continue;
    std::string path = m[1], place = file + ":" + std::to_string(number) + ": includes " + path;
    if (path.find("pjrt_c_api") != std::string::npos && module != "pjrt") found.push_back(place + ", only pjrt/ may");
    if (path.rfind("maxdiffusion/", 0) == 0) {
      std::string other = path.substr(13, path.find('/', 13) - 13);
      if (!allowed.count(other)) found.push_back(place + ", " + module + "/ may not include " + other + "/");
    } else if (path.find("apps/") == 0 || path.find("tests/") == 0 || path.find("../") != std::string::npos) {
      found.push_back(place + ", paths start with maxdiffusion/");
    }
  }
  return found;
}

bool is_source(const fs::path& path) {
  return path.extension() == ".h" || path.extension() == ".cc" || path.extension() == ".inc";
}

TEST(Layering, EveryFolderHasARowAndEveryRowAFolder) {
  Table table = granted(read(kRoot / "docs/design.md"));
  Names rows, folders;
  for (const auto& [module, grants] : table) {
    rows.insert(module);
    for (const auto& name : grants) EXPECT_TRUE(table.count(name)) << module << " may include unknown " << name;
  }
  for (const auto& entry : fs::directory_iterator(kRoot / "maxdiffusion")) {
    if (!entry.is_directory()) continue;
    auto begin = fs::recursive_directory_iterator(entry);
    if (std::any_of(begin, {}, [](const auto& f) { return is_source(f.path()); })) {
      folders.insert(entry.path().filename());
    }
  }
  for (const auto& folder : folders) EXPECT_TRUE(rows.count(folder)) << folder << "/ has no row in docs/design.md";
  for (const auto& row : rows) EXPECT_TRUE(folders.count(row)) << row << "/ of docs/design.md has no sources";
}

TEST(Layering, NoModuleReachesItself) {
  Table table = granted(read(kRoot / "docs/design.md"));
  for (const auto& [module, grants] : table) {
    for (const auto& name : grants) EXPECT_FALSE(reach(table, name).count(module)) << module << " ↔ " << name;
  }
}

TEST(Layering, IncludesStayWithinTheTable) {
  Table table = granted(read(kRoot / "docs/design.md"));
  ASSERT_FALSE(table.empty());
  int files = 0;
  for (const auto& [module, grants] : table) {
    if (!fs::exists(kRoot / "maxdiffusion" / module)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / "maxdiffusion" / module)) {
      if (!is_source(entry.path())) continue;
      ++files;
      auto found = violations(table, module, fs::relative(entry.path(), kRoot), read(entry.path()));
      ASSERT_TRUE(found.empty()) << found[0];
    }
  }
  EXPECT_GT(files, 50);
}

TEST(Layering, EveryGrantIsUsed) {
  Table table = granted(read(kRoot / "docs/design.md"));
  ASSERT_FALSE(table.empty());
  for (const auto& [module, grants] : table) {
    if (!fs::exists(kRoot / "maxdiffusion" / module)) continue;
    std::vector<Names> files;
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / "maxdiffusion" / module)) {
      if (is_source(entry.path()) && !entry.path().stem().string().ends_with("_test"))
        files.push_back(included(read(entry.path())));
    }
    for (const auto& name : unused(table, module, files))
      ADD_FAILURE() << module << "/ may include " << name << "/, but none of its files does: take the grant away";
  }
}

TEST(Layering, CMakeLinksWhatTheTableGrants) {
  Table table = granted(read(kRoot / "docs/design.md")), linked;
  std::string cmake = read(kRoot / "cmake/modules.cmake");
  static const std::regex call(R"(\nmd_module\((\w+)(?:\s+USES((?:\s+[a-z]\w*)+))?)");
  for (std::sregex_iterator i(cmake.begin(), cmake.end(), call), end; i != end; ++i) {
    std::istringstream names((*i)[2].str());
    Names& uses = linked[(*i)[1].str()];
    for (std::string name; names >> name;) uses.insert(name);
  }
  for (const auto& [module, grants] : table) EXPECT_EQ(reach(linked, module), reach(table, module)) << module;
}

// The checks above must be able to fail.

const Table kSample = {{"base", {}}, {"graph", {"base"}}, {"ops", {"graph"}}, {"pjrt", {"base"}}};

/// Lines of code, without comments, that name a model family or one of its classes.
std::vector<std::string> names_of_families(const std::string& source, const std::string& where) {
  static const std::regex family(
      "sdxl|stable.?diffusion|unet2d|unet.?config|vae.?config|autoencoder.?kl|clip.?text|clip.?token|controlnet(config|"
      "model\\b)"
      "|\\bwan(\\b|_|[0-9])|flux|umt5",
      std::regex::icase);
  std::vector<std::string> found;
  std::istringstream lines(source);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (const size_t comment = line.find("//"); comment != std::string::npos) line.resize(comment);
    if (std::regex_search(line, family)) found.push_back(where + ":" + std::to_string(number) + ": " + line);
  }
  return found;
}

// P-3
TEST(Layering, TrainingAndSamplingNameNoFamily) {
  for (const char* folder :
       {"maxdiffusion/encoders", "maxdiffusion/tasks", "maxdiffusion/pipelines", "maxdiffusion/train",
        "maxdiffusion/settings", "maxdiffusion/run", "maxdiffusion/convert", "maxdiffusion/commands", "apps"})
    for (const auto& file : fs::recursive_directory_iterator(kRoot / folder)) {
      const std::string path = file.path().string();
      if (!file.is_regular_file() || path.ends_with("_test.cc")) continue;
      for (const std::string& line : names_of_families(read(file.path()), path)) ADD_FAILURE() << line;
    }
}

/// Lines of a source above settings/ that copy the config: it must be passed by const reference.
std::vector<std::string> copies_of_config(const std::string& source, const std::string& path) {
  static const std::regex copy(R"(\bRunConfig \w+\s*(,|\)|;|=|\{))"),
      made(R"(\bRunConfig \w+ = (md::)?(config_of|RunConfig::load)\()");
  std::vector<std::string> found;
  std::istringstream lines(source);
  for (auto [line, n] = std::pair{std::string(), 1}; std::getline(lines, line); ++n)
    if (std::regex_search(line, copy) && !std::regex_search(line, made) && line.find("defaults") == line.npos)
      found.push_back(path + ":" + std::to_string(n) + ": " + line);
  return found;
}

TEST(Layering, TheConfigEndsWithTheRequestsThatAreMadeOfIt) {
  static const std::regex named(R"(\bRunConfig\b)");
  // Commands read a config and turn it into a request (settings/requests.h), which all other code receives. The page of
  // keys prints its defaults.
  const Names may = {"commands/command.h", "commands/command.cc", "commands/key_reference.cc"};
  for (const auto& file : fs::recursive_directory_iterator(kRoot / "maxdiffusion")) {
    const std::string name = fs::relative(file.path(), kRoot / "maxdiffusion");
    if (!file.is_regular_file() || name.starts_with("settings/") || name.ends_with("_test.cc")) continue;
    const std::string source = read(file.path());
    EXPECT_TRUE(may.contains(name) || !std::regex_search(source, named)) << name << " names RunConfig";
    for (const std::string& line : copies_of_config(source, name)) ADD_FAILURE() << line;
  }
}

// One reader for each of JSON, YAML and TOML limits how long texts are and how deeply values nest.
TEST(Layering, TextIsParsedInTheFilesThatLimitItsDepthAndSize) {
  static const std::regex parse(
      R"(\b([jJ]son::(parse|accept|sax_parse|from_\w+)|YAML::(Load\w*|Parser)|toml::parse(_file)?)\b *[({])");
  const Names may = {"base/parse_json.cc", "base/load_yaml.cc", "data/folders/toml_text.cc"};
  size_t found = 0;
  for (const auto& file : fs::recursive_directory_iterator(kRoot / "maxdiffusion")) {
    const std::string name = fs::relative(file.path(), kRoot / "maxdiffusion");
    if (!file.is_regular_file() || name.ends_with("_test.cc")) continue;
    const std::string source = read(file.path());  // the search is fast, the regex is not
    const bool may_parse = source.find("arse") != source.npos || source.find("::accept(") != source.npos ||
                           source.find("YAML::") != source.npos || source.find("son::from_") != source.npos;
    const bool parses = may_parse && std::regex_search(source, parse);
    found += parses ? 1 : 0;
    EXPECT_TRUE(may.contains(name) || !parses)
        << name << " parses text itself; expected parse_json, load_yaml or parse_toml";
  }
  EXPECT_EQ(found, may.size());
}

TEST(LayeringCheck, FindsCopiesOfTheConfig) {
  EXPECT_EQ(copies_of_config("void f(RunConfig c);\nvoid g(const RunConfig& c);\nconst RunConfig d = c;\n", "f"),
            (std::vector<std::string>{"f:1: void f(RunConfig c);", "f:3: const RunConfig d = c;"}));
}

TEST(LayeringCheck, FindsNamesOfFamiliesInCodeOnly) {
  EXPECT_EQ(names_of_families("int a;  // as SDXL\nUNetConfig c;\nif (is_flux) return;\nint want;\n", "f"),
            (std::vector<std::string>{"f:2: UNetConfig c;", "f:3: if (is_flux) return;"}));
}

TEST(LayeringCheck, ReadsTheTable) {
  Table table = granted(
      "| module | x |\n| `no/` | a | base |\n\n| module | one line | may include |\n| --- | --- | --- |\n"
      "| `base/` | b, c | – |\n| `graph/` | d | base |\n| `ops/` | e | base, graph |\n\n| `late/` | f | base |\n");
  EXPECT_EQ(table, (Table{{"base", {}}, {"graph", {"base"}}, {"ops", {"base", "graph"}}}));
}

TEST(LayeringCheck, GrantsReachThrough) {
  EXPECT_EQ(reach(kSample, "ops"), (Names{"base", "graph", "ops"}));
  EXPECT_TRUE(
      violations(kSample, "ops", "f.cc", "#include \"maxdiffusion/base/error.h\"\n#include <vector>\n").empty());
}

TEST(LayeringCheck, FindsUnusedGrants) {
  const Names found =
      included("#include \"maxdiffusion/base/error.h\"\n # include <maxdiffusion/graph/op.h>\n// pjrt/\n");
  EXPECT_EQ(found, (Names{"base", "graph"}));
  const Table table = {{"ops", {"base", "graph", "mesh"}}};
  EXPECT_EQ(unused(table, "ops", {{"base"}, {"graph", "ops"}}), (Names{"mesh"}));
  EXPECT_TRUE(unused(table, "ops", {{"base", "mesh"}, {"graph"}}).empty());
}

TEST(LayeringCheck, NamesTheLineThatBreaksTheRule) {
  auto found = violations(kSample, "graph", "f.cc", "\n# include \"maxdiffusion/ops/dot.h\"\n");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0], "f.cc:2: includes maxdiffusion/ops/dot.h, graph/ may not include ops/");
  EXPECT_EQ(violations(kSample, "base", "f.cc", "#include <maxdiffusion/graph/op.h>").size(), 1u);
  EXPECT_EQ(violations(kSample, "base", "f.cc", "#include \"../graph/op.h\"").size(), 1u);
}

TEST(LayeringCheck, OnlyPjrtSeesTheCApi) {
  std::string line = "#include \"pjrt_c_api.h\"";
  EXPECT_EQ(violations(kSample, "graph", "f.cc", line).size(), 1u);
  EXPECT_TRUE(violations(kSample, "pjrt", "f.cc", line).empty());
}

}  // namespace
