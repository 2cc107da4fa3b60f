#include "maxdiffusion/config/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

struct Sample {
  bool flag = false;
  int64_t steps = 10;
  double rate = 1e-5;
  std::string run_name;
  std::optional<int64_t> limit;
  std::optional<double> share;
  std::optional<bool> choice;
  std::vector<std::string> axes = {"data", "fsdp"};
  std::vector<int64_t> sizes;
  std::vector<double> ratios;
  std::map<std::string, std::string> bias;
  JsonText rules;

  template <class V>
  void visit(V&& v) {
    v("enable_profiler", flag, "a switch");
    v("max_train_steps", steps, "a count");
    v("learning_rate", rate, "a number");
    v("run_name", run_name, "a text");
    v("limit", limit, "a count or none");
    v("share", share, "a number or none");
    v("choice", choice, "a switch or none");
    v("mesh_axes", axes, "texts");
    v("sizes", sizes, "counts");
    v("ratios", ratios, "numbers");
    v("timestep_bias", bias, "a mapping");
    v("logical_axis_rules", rules, "any YAML");
  }
  bool operator==(const Sample&) const = default;
};

Sample parse(const std::string& yaml, const std::vector<std::string>& words = {}) {
  Sample s;
  KeyList keys;
  keys.add(s);
  keys.assign(ConfigSource::from_text(yaml, words));
  return s;
}

std::string print(Sample s) {
  KeyList keys;
  keys.add(s);
  return keys.to_yaml();
}

/// The whole message of the error that parsing throws.
std::string refusal(const std::string& yaml, const std::vector<std::string>& words = {}) {
  try {
    parse(yaml, words);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class ConfigFiles : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    make_folders(std::filesystem::path(folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  TemporaryFolder folder_;
};

TEST(Config, ReadsEveryType) {
  Sample s = parse(R"(
# a comment
enable_profiler: True
max_train_steps: 1_500
learning_rate: 4.25e-6
run_name: 'it''s a run'
limit: 7
share: 0.5
choice: False
mesh_axes: ['data', "fsdp", context,   # over several lines
            tensor,]
sizes: [1, -2]
ratios: [1, 2.5]
timestep_bias: {strategy: "later", multiplier: 2.0, deep: {a: [1, x y]}}
logical_axis_rules: [['batch', 'data'], ['embed', ['fsdp', 'tensor']], ['norm', null]]
)");
  EXPECT_TRUE(s.flag);
  EXPECT_EQ(s.steps, 1500);
  EXPECT_EQ(s.rate, 4.25e-6);
  EXPECT_EQ(s.run_name, "it's a run");
  EXPECT_EQ(s.limit, 7);
  EXPECT_EQ(s.share, 0.5);
  EXPECT_EQ(s.choice, false);
  EXPECT_EQ(s.axes, (std::vector<std::string>{"data", "fsdp", "context", "tensor"}));
  EXPECT_EQ(s.sizes, (std::vector<int64_t>{1, -2}));
  EXPECT_EQ(s.ratios, (std::vector<double>{1, 2.5}));
  EXPECT_EQ(s.bias.at("strategy"), R"("later")");
  EXPECT_EQ(s.bias.at("multiplier"), "2.0");
  EXPECT_EQ(s.bias.at("deep"), R"({"a": [1, "x y"]})");
  EXPECT_EQ(s.rules.text, R"([["batch", "data"], ["embed", ["fsdp", "tensor"]], ["norm", null]])");
}

TEST(Config, EmptyTextKeepsDefaults) {
  EXPECT_EQ(parse(""), Sample());
  EXPECT_EQ(parse("# nothing but a comment\n"), Sample());
}

TEST(Config, BooleansAreYaml11InAnyCaseOrOneAndZero) {
  for (std::string t : {"true", "True", "TRUE", "tRuE", "yes", "Yes", "on", "ON", "1", "\"True\""}) {
    EXPECT_TRUE(parse("enable_profiler: " + t).flag) << t;
    if (t[0] == '"') continue;
    EXPECT_TRUE(parse("", {"enable_profiler=" + t}).flag) << t;
  }
  for (std::string t : {"false", "FALSE", "no", "No", "off", "0"}) {
    EXPECT_FALSE(parse("enable_profiler: true", {"enable_profiler=" + t}).flag) << t;
  }
  for (std::string t : {"2", "-1", "1.0", "maybe", "t", ""}) {
    EXPECT_NE(refusal("", {"enable_profiler=" + t}), "accepted") << t;
  }
}

TEST(Config, FloatsNeedNoPoint) {
  for (std::string t : {"1e-8", "1.e-8", "1.0e-8", "1E-8", "+1e-8", "0.00000001"}) {
    EXPECT_EQ(parse("learning_rate: " + t).rate, 1e-8) << t;
    EXPECT_EQ(parse("", {"learning_rate=" + t}).rate, 1e-8) << t;
  }
  EXPECT_EQ(parse("learning_rate: 1").rate, 1.0);
  EXPECT_EQ(parse("learning_rate: -.5").rate, -0.5);
}

TEST(Config, WholeNumbersMayBeWrittenAsFloats) {
  for (std::string t : {"1e3", "1000.0", "1E+3", "1_000", "1000"}) {
    EXPECT_EQ(parse("max_train_steps: " + t).steps, 1000) << t;
    EXPECT_EQ(parse("", {"max_train_steps=" + t}).steps, 1000) << t;
  }
}

TEST(Config, InvalidNumbersAreRefused) {
  for (std::string t : {"1e", "1.5.2", "one", "0x10", "--1", "+-1", "1_", "1 2", "", "1e999999", "nan", ".nan", "inf",
                        "-inf", ".inf", "1e38", "-1.1e15"}) {
    EXPECT_NE(refusal("", {"learning_rate=" + t}), "accepted") << t;
  }
  for (std::string t :
       {"1.5", "1e-1", "1e300", ".inf", "nan", "9223372036854775808", "0x10", "++1", "_1", "", "null"}) {
    EXPECT_NE(refusal("", {"max_train_steps=" + t}), "accepted") << t;
  }
}

TEST(Config, NullClearsOptionalKeysOnly) {
  for (std::string t : {"null", "None", "none", "~", "NULL"}) {
    EXPECT_EQ(parse("limit: 3", {"limit=" + t}).limit, std::nullopt) << t;
    EXPECT_EQ(parse("share: " + t).share, std::nullopt) << t;
    EXPECT_EQ(parse("choice: true", {"choice=" + t}).choice, std::nullopt) << t;
  }
  EXPECT_EQ(parse("run_name: null").run_name, "");
  EXPECT_EQ(parse("run_name: None").run_name, "");  // Python's null, a string in YAML
  EXPECT_EQ(parse("run_name: 'None'").run_name, "None");
  EXPECT_EQ(parse("", {"run_name=None"}).run_name, "None");
  EXPECT_EQ(parse("run_name: 'null'").run_name, "null");
  EXPECT_EQ(parse("", {"run_name=null"}).run_name, "null");
  EXPECT_TRUE(contains(refusal("max_train_steps: null"), "max_train_steps is `null`"));
}

TEST(Config, TextOnTheCommandLineIsTakenAsItIs) {
  EXPECT_EQ(parse("", {"run_name='a'"}).run_name, "'a'");
  EXPECT_EQ(parse("", {"run_name=[a"}).run_name, "[a");
  EXPECT_EQ(parse("", {"run_name="}).run_name, "");
  EXPECT_EQ(parse("run_name: 123").run_name, "123");
}

TEST(Config, OneTextIsAListOfOne) {
  for (std::string t : {"a red apple, sliced", "data", "1"}) {
    EXPECT_EQ(parse("", {"mesh_axes=" + t}).axes, std::vector<std::string>{t});
  }
  EXPECT_EQ(parse("mesh_axes: a red apple").axes, std::vector<std::string>{"a red apple"});
  EXPECT_EQ(parse("mesh_axes: '[a]'").axes, std::vector<std::string>{"[a]"});
}

TEST(Config, TextMayLookLikeAList) {
  for (std::string t : {"{a}", "[b]", "(c)", "['d']", "null", "1984", "true"})
    EXPECT_EQ(parse("", {"run_name=" + t}).run_name, t);
}

struct Prompts {
  Texts prompt = {"default"};
  OptionalTexts negative = {"default"};
  template <class V>
  void visit(V&& v) {
    v("prompt", prompt, "texts");
    v("negative_prompt", negative, "texts or none");
  }
  bool operator==(const Prompts&) const = default;
};

Prompts prompts(const std::string& yaml, const std::vector<std::string>& words = {}) {
  Prompts p;
  KeyList keys;
  keys.add(p);
  keys.assign(ConfigSource::from_text(yaml, words));
  return p;
}

// P-10
TEST(Texts, AreOneTextUnlessAllOfItIsAList) {
  for (std::string t : {"(masterpiece:1.2), [bad], {curly}",
                        "(masterpiece:1.2)",
                        "[bad]",
                        "[bad], [worse]",
                        "[bad], a, [worse]",
                        "[a, [b]]",
                        "[a: 1, b]",
                        "[a, null]",
                        "{curly}",
                        "{a, b}",
                        "(a, b)",
                        "['a'], b",
                        "['a'] # b",
                        "['a', 'b'",
                        "('a')",
                        "['a'],",
                        "['a' 'b']",
                        "[,]",
                        "['a',,]",
                        "[['a']]",
                        "[\"a\"",
                        "[\"\\q\"]",
                        "'a'",
                        "\"a\", \"b\"",
                        "[null]",
                        "[1]",
                        "[",
                        "(",
                        "null",
                        "None",
                        "1984",
                        "true",
                        "",
                        " a ",
                        "a: b",
                        "*x",
                        "&y",
                        "a\nb"}) {
    EXPECT_EQ(prompts("", {"prompt=" + t}).prompt, Texts{t}) << t;
    if (t == "null") continue;
    EXPECT_EQ(prompts("", {"negative_prompt=" + t}).negative, OptionalTexts{t}) << t;
  }
}

TEST(Texts, AreAListWhereAllOfItIsAList) {
  const std::map<std::string, Texts> lists = {
      {"[\"a\",\"b\"]", {"a", "b"}},
      {"['a', 'b']", {"a", "b"}},
      {" ( 'a' , \"b\" , ) ", {"a", "b"}},
      {"('a',)", {"a"}},
      {"['(a:1.2), [b]', '{c}']", {"(a:1.2), [b]", "{c}"}},
      {R"(['it''s \(a\)', "say \"b\" \ud83c\udf4e\n"])", {R"(it's \(a\))", "say \"b\" 🍎\n"}},
      {"['']", {""}},
      {"[]", {}},
      {"()", {}},
      {"[a, b]", {"a", "b"}},
      {"[a red heart, (b:1.2), 'c, d', 007]", {"a red heart", "(b:1.2)", "c, d", "007"}},
  };
  for (const auto& [text, list] : lists) EXPECT_EQ(prompts("", {"prompt=" + text}).prompt, list) << text;
}

TEST(Texts, FromYamlAreItsScalarsAndLists) {
  EXPECT_EQ(prompts("prompt: (a:1.2), b").prompt, Texts{"(a:1.2), b"});
  EXPECT_EQ(prompts("prompt: \"['a', 'b']\"").prompt, Texts{"['a', 'b']"});
  EXPECT_EQ(prompts("prompt: ('a', 'b')").prompt, Texts{"('a', 'b')"});
  EXPECT_EQ(prompts("prompt: 1984").prompt, Texts{"1984"});
  EXPECT_EQ(prompts("prompt: true").prompt, Texts{"true"});
  EXPECT_EQ(prompts("prompt: [red heart, (a:1.2), 007, yes, 'null',\n  \"b, c\"]").prompt,
            (Texts{"red heart", "(a:1.2)", "007", "yes", "null", "b, c"}));
  EXPECT_EQ(prompts("prompt: []").prompt, Texts{});
}

TEST(Texts, NullIsTheEmptyListOfOptionalTexts) {
  EXPECT_EQ(prompts("", {"negative_prompt=null"}).negative, OptionalTexts{});
  EXPECT_EQ(prompts("negative_prompt: null").negative, OptionalTexts{});
  EXPECT_EQ(prompts("negative_prompt: 'null'").negative, OptionalTexts{"null"});
  EXPECT_EQ(prompts("", {"negative_prompt=['null']"}).negative, OptionalTexts{"null"});
  EXPECT_EQ(prompts("", {"prompt=null"}).prompt, Texts{"null"});
  for (const char* yaml : {"prompt: null", "prompt:", "prompt: {a: b}", "prompt: [[a]]", "prompt: [a, null]"})
    EXPECT_THROW(prompts(yaml), Error) << yaml;
}

TEST(Texts, PrintedReadBack) {
  const Prompts p{{"(a:1.2), [b], {c}", "null", "1984", "", "it's \"\\n\"\n"}, {"[]"}};
  for (const Prompts& each : {p, Prompts{{}, {}}}) {
    Prompts copy = each;
    KeyList keys;
    keys.add(copy);
    EXPECT_EQ(prompts(keys.to_yaml()), each) << keys.to_yaml();
  }
}

TEST(Config, ListsOfTextsKeepEveryLetter) {
  std::vector<std::string> expected = {"007", "yes", "1e3", "None", "a b"};
  EXPECT_EQ(parse("mesh_axes: [007, yes, 1e3, None, a b]").axes, expected);
  EXPECT_EQ(parse("", {"mesh_axes=[007, yes, 1e3, None, a b]"}).axes, expected);
}

TEST(Config, OverridesSplitAtTheFirstEqualsSign) { EXPECT_EQ(parse("", {"run_name=a=b=c"}).run_name, "a=b=c"); }

TEST(Config, TheLastOverrideWins) {
  EXPECT_EQ(parse("run_name: zero", {"run_name=one", "run_name=two"}).run_name, "two");
}

TEST(Config, AWordWithoutEqualsSignIsNamed) {
  EXPECT_TRUE(contains(refusal("", {"max_train_steps"}), "'max_train_steps' is not of the form key=value"));
  EXPECT_TRUE(contains(refusal("", {"=5"}), "'=5'"));
  EXPECT_TRUE(contains(refusal("", {"hf_access_token"}), "'hf_access_token' is not of the form key=value"));
  EXPECT_TRUE(contains(refusal("", {"hf_abcdefgh"}), "a token of the Hugging Face hub is not of the form key=value"));
}

TEST(Config, WordsWithoutKeyAndValueAreRefusedWithAdvice) {
  EXPECT_TRUE(contains(refusal("", {"cat"}), "try: quote values that contain spaces"));
  EXPECT_TRUE(contains(refusal("", {"b.yml"}), "a command takes one config file"));
  EXPECT_TRUE(contains(refusal("", {"-n"}), "try: key=value, --key=value or --key value"));
}

TEST(Config, OverridesMayBeWrittenAsOptions) {
  using Words = std::vector<std::string>;
  Sample s;
  KeyList keys;
  keys.add(s);
  EXPECT_EQ(keys.overrides({"limit=1", "--run_name", "a=b c", "--max-train-steps=5", "--enable_profiler", "--limit",
                            "-3", "--choice", "null", "--enable_profiler", "no", "--choice"}),
            (Words{"limit=1", "run_name=a=b c", "max_train_steps=5", "enable_profiler=true", "limit=-3", "choice=null",
                   "enable_profiler=no", "choice=true"}));
  EXPECT_EQ(keys.overrides({"--enable_profiler", "limit=2"}), (Words{"enable_profiler=true", "limit=2"}));
  EXPECT_EQ(keys.overrides({"--nothing", "5", "--none"}), (Words{"nothing=5", "none=true"}));  // assign() reports them
  for (const Words& words : {Words{"--limit"}, Words{"--limit", "--run_name", "a"}}) {
    try {
      keys.overrides(words);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), "config: command line: --limit has no value; expected a whole number or null");
    }
  }
}

// S0-40
TEST(Config, OverridesUnderstandPythonLiterals) {
  Sample s = parse("", {"mesh_axes=('a', \"b (c)\",)", "sizes=[1, 2,]", "ratios=(0.5,)",
                        "timestep_bias={'strategy': 'later', \"multiplier\":2.0,'on':True, 'none': None,}",
                        "logical_axis_rules=(('batch', ('data', 'fsdp')), ('norm', None))"});
  EXPECT_EQ(s.axes, (std::vector<std::string>{"a", "b (c)"}));
  EXPECT_EQ(s.sizes, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(s.ratios, (std::vector<double>{0.5}));
  EXPECT_EQ(s.bias, (std::map<std::string, std::string>{
                        {"strategy", R"("later")"}, {"multiplier", "2.0"}, {"on", "true"}, {"none", "null"}}));
  EXPECT_EQ(s.rules.text, R"([["batch", ["data", "fsdp"]], ["norm", null]])");
}

TEST(Config, NumbersOnTheCommandLineNeedNoBrackets) {
  Sample s = parse("", {"ratios=0.8,0.5", "sizes=7"});
  EXPECT_EQ(s.ratios, (std::vector<double>{0.8, 0.5}));
  EXPECT_EQ(s.sizes, (std::vector<int64_t>{7}));
  EXPECT_TRUE(contains(refusal("", {"ratios=0.8,half"}), "0.8,half"));
}

TEST(Config, MembersOfMappingsAreJson) {
  Sample s =
      parse("timestep_bias: {a: 1.e-8, b: .5, c: 1_000, d: yes, e: None, f: ~, g: '1', h: 07:30, i: 'é\"', j: +3}");
  EXPECT_EQ(s.bias, (std::map<std::string, std::string>{{"a", "1e-08"},
                                                        {"b", "0.5"},
                                                        {"c", "1000"},
                                                        {"d", "true"},
                                                        {"e", "null"},
                                                        {"f", "null"},
                                                        {"g", R"("1")"},
                                                        {"h", R"("07:30")"},
                                                        {"i", R"("é\"")"},
                                                        {"j", "3"}}));
}

TEST(Config, MappingOverrideReplacesTheMapping) {
  Sample s = parse("timestep_bias: {strategy: none, begin: 0}", {R"(timestep_bias={"strategy":"later"})"});
  EXPECT_EQ(s.bias, (std::map<std::string, std::string>{{"strategy", R"("later")"}}));
}

TEST(Config, RenamedKeysAndValuesAreReadUnderTheirNewNamesWithALogLineEach) {
  const std::vector<KeyRename> renames = {{"rate", "learning_rate"}, {"run_name", "run_name", {{"old", "new"}}}};
  const auto renamed = [&](const std::string& yaml, const std::vector<std::string>& words = {}) {
    ConfigSource source = ConfigSource::from_text(yaml, words);
    source.rename(renames);
    Sample s;
    KeyList keys;
    keys.add(s);
    keys.assign(source);
    return s;
  };
  testing::internal::CaptureStderr();
  const Sample s = renamed("rate: 0.5\nrun_name: old\n");
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(s.rate, 0.5);
  EXPECT_EQ(s.run_name, "new");
  EXPECT_TRUE(contains(log, "config: text:1: `rate` is now `learning_rate`")) << log;
  EXPECT_TRUE(contains(log, "config: text:2: `run_name=old` is now `new`")) << log;
  EXPECT_EQ(renamed("rate: 0.5\nlearning_rate: 0.25\n").rate, 0.25);
  EXPECT_EQ(renamed("learning_rate: 0.25\n", {"rate=0.5"}).rate, 0.5);
  EXPECT_EQ(renamed("rate: 0.5\n", {"learning_rate=0.25"}).rate, 0.25);
}

TEST(Config, UnknownKeyNamesPlaceAndNearestKey) {
  std::string message = refusal("run_name: a\nlearning_rat: 1e-4\n");
  EXPECT_TRUE(contains(message, "text:2")) << message;
  EXPECT_TRUE(contains(message, "`learning_rat`")) << message;
  EXPECT_TRUE(contains(message, "did you mean `learning_rate`?")) << message;
  message = refusal("", {"max_steps=5"});
  EXPECT_TRUE(contains(message, "command line")) << message;
  message = refusal("zzzzzzzz: 1");
  EXPECT_FALSE(contains(message, "did you mean")) << message;
}

TEST(Config, WrongTypeNamesPlaceKeyTextAndExpectation) {
  std::string message = refusal("run_name: a\n\nmax_train_steps: many\n");
  EXPECT_EQ(message, "config: text:3: max_train_steps is `many`, expected a whole number\n  max_train_steps: a count");
  EXPECT_TRUE(contains(refusal("max_train_steps: '5'"), "quoted"));
  EXPECT_TRUE(contains(refusal("learning_rate: [1]"), "learning_rate is `[1]`, expected a number"));
  EXPECT_TRUE(contains(refusal("run_name: [1]"), "expected text"));
  EXPECT_TRUE(contains(refusal("run_name: {a: 1}"), "expected text"));
  EXPECT_TRUE(contains(refusal("mesh_axes: null"), "expected a text or a list of texts"));
  EXPECT_TRUE(contains(refusal("mesh_axes: {a: 1}"), "expected a text or a list of texts"));
  EXPECT_TRUE(contains(refusal("mesh_axes: [[a]]"), "expected a text or a list of texts"));
  EXPECT_TRUE(contains(refusal("sizes: [1, 2.5]"), "expected a list of whole numbers"));
  EXPECT_TRUE(contains(refusal("sizes: [1, '2']"), "expected a list of whole numbers"));
  EXPECT_TRUE(contains(refusal("timestep_bias: [1]"), "expected a mapping"));
  EXPECT_TRUE(contains(refusal("", {"timestep_bias=later"}), "command line: timestep_bias is `later`"));
  EXPECT_TRUE(contains(refusal("", {"mesh_axes=['a'"}), "a list of texts"));
  EXPECT_TRUE(contains(refusal("", {"logical_axis_rules=[["}), "expected"));
}

TEST(Config, AnAliasToItselfNamesTheLine) {
  EXPECT_TRUE(contains(refusal("# a comment\nmesh_axes: &a [*a, *a]"),
                       "config: text:2 cannot be read as YAML: an alias refers"));
  EXPECT_TRUE(contains(refusal("max: 1\nmesh_axes: [x, &b {c: [*b]}]"), "text:2 cannot be read as YAML: an alias"));
  EXPECT_TRUE(contains(refusal("", {"logical_axis_rules=&a [*a]"}), "command line"));
  // Nine lists, each with ten references to the one before: a billion elements.
  std::string bomb = "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n";
  for (int i = 1; i < 9; ++i) {
    const std::string before = fmt::format("*x{}", i - 1);
    bomb += fmt::format("x{}: &x{} [", i, i);
    for (int k = 0; k < 10; ++k) bomb += before + (k < 9 ? ", " : "]\n");
  }
  EXPECT_TRUE(contains(refusal(bomb), "more than a million values"));
  // Two thousand lists of 400 levels, each around the one before: few values, 800,000 levels.
  std::string deep;
  for (int i = 0; i < 2000; ++i)
    deep += fmt::format("x{}: &x{} {}{}{}\n", i, i, std::string(400, '['), i ? fmt::format("*x{}", i - 1) : "",
                        std::string(400, ']'));
  EXPECT_TRUE(contains(refusal(deep), "values nest more than 512 levels deep"));
}

TEST(Config, TagsAndSecondDocumentsAreRefused) {
  EXPECT_TRUE(
      contains(refusal("limit: 1\nrun_name: !!python/object:os.system x"),
               "text:2 cannot be read as YAML: the tag tag:yaml.org,2002:python/object:os.system is not known"));
  EXPECT_TRUE(contains(refusal("mesh_axes: [!local a]"), "the tag !local is not known"));
  EXPECT_EQ(parse("run_name: !!str 5\nsizes: !!seq [1]").run_name, "5");
  EXPECT_TRUE(contains(refusal("limit: 1\n---\nlimit: 2\n"), "config: text:2: a second YAML document begins"));
  EXPECT_TRUE(contains(refusal("--- {limit: 1}\n--- {limit: 2}\n"), "config: text:2: a second YAML document begins"));
  EXPECT_TRUE(contains(refusal("limit: 1\n...\n# more\n---\nlimit: 2\n"), ": a second YAML document begins"));
  EXPECT_EQ(parse("%YAML 1.2\n---\n# one\nlimit: 1\n...\n---\n# nothing\n").limit, 1);
  EXPECT_EQ(parse("# one\n---\nrun_name: |\n  ---\n  a\n").run_name, "---\na\n");
}

TEST(Config, BrokenYamlNamesTheLine) {
  std::string message = refusal("run_name: a\nlimit: [1, 2\n");
  EXPECT_TRUE(contains(message, "text:")) << message;
  EXPECT_TRUE(contains(message, "cannot be read as YAML")) << message;
  EXPECT_TRUE(contains(refusal("- a\n- b\n"), "a list at its top level"));
  EXPECT_TRUE(contains(refusal("just words"), "a single value at its top level"));
  EXPECT_TRUE(contains(refusal("[1, 2]: 3"), "a key must be a word"));
}

TEST_F(ConfigFiles, ChildReplacesParentRelativeToItsOwnFolder) {
  write("base.yml", "run_name: base\nmax_train_steps: 1\ntimestep_bias: {a: 1, b: 2}\n");
  write("sub/middle.yml", "base: ../base.yml\nlimit: 4\nmax_train_steps: 2\n");
  std::string leaf = write("leaf.yml", "timestep_bias: {a: 3}\nbase: sub/middle.yml\n");
  Sample s;
  KeyList keys;
  keys.add(s);
  ConfigSource source = ConfigSource::load(leaf, {"limit=5"});
  keys.assign(source);
  EXPECT_EQ(s.run_name, "base");
  EXPECT_EQ(s.steps, 2);
  EXPECT_EQ(s.limit, 5);
  EXPECT_EQ(s.bias, (std::map<std::string, std::string>{{"a", "3"}}));
  EXPECT_EQ(source.values().at("max_train_steps").where, folder_ / "sub/middle.yml" + ":3");
  EXPECT_EQ(source.values().count("base"), 0u);
}

struct Places {
  std::string data, model, output, text, cache = "off";
  std::vector<std::string> files;
  template <class V>
  void visit(V&& v) {
    v("data", data, "", KeyPath::input);
    v("model", model, "", KeyPath::input_or_word);
    v("output", output, "", KeyPath::output);
    v("cache", cache, "", KeyPath::output_or_word);
    v("files", files, "", KeyPath::input);
    v("text", text, "");
  }
};

Places places(const std::string& file, const std::vector<std::string>& words = {}) {
  Places p;
  KeyList keys;
  keys.add(p);
  keys.assign(ConfigSource::load(file, words));
  return p;
}

TEST_F(ConfigFiles, PathsOfInputsAreRelativeToTheFileThatNamesThem) {
  write("sub/a.bin", "");
  write("sub/b.bin", "");
  const std::string in = folder_.path(), sub = in + "/sub/";
  const std::string base =
      write("sub/base.yml", "data: a.bin\nmodel: ./a.bin\noutput: runs\ntext: a.bin\nfiles: [a.bin, ../sub/b.bin]\n");
  for (const std::string& file : {base, write("leaf.yml", "base: sub/base.yml\n")}) {
    const Places p = places(file);
    EXPECT_EQ(p.data, sub + "a.bin");
    EXPECT_EQ(p.model, sub + "a.bin");
    EXPECT_EQ(p.output, "runs");
    EXPECT_EQ(p.text, "a.bin");
    EXPECT_EQ(p.files, (std::vector<std::string>{sub + "a.bin", sub + "b.bin"}));
  }
  EXPECT_EQ(places(base, {"data=a.bin"}).data, "a.bin");  // command line: relative to the working folder
  // Lists with commas, patterns, missing files, names and URIs.
  const auto data = [&](const std::string& text) { return places(write("sub/c.yml", "data: " + text)).data; };
  EXPECT_EQ(data("a.bin,b.bin"), sub + "a.bin," + sub + "b.bin");
  EXPECT_EQ(data("'*.bin'"), sub + "*.bin");
  EXPECT_EQ(data("nowhere"), sub + "nowhere");
  EXPECT_EQ(data("gs://bucket/a"), "gs://bucket/a");
  EXPECT_EQ(data("/a"), "/a");
  EXPECT_EQ(data("''"), "");
  EXPECT_EQ(places(write("sub/d.yml", "model: owner/name")).model, "owner/name");
}

TEST_F(ConfigFiles, NamesOfInputsAreTakenBeforeListsAndPatterns) {
  write("sub/[artist] set/a.bin", "");
  write("sub/a, b/c, d.bin", "");
  write("sub/a", "");
  const std::string sub = folder_.path() + "/sub/";
  const auto data = [&](const std::string& text) { return places(write("sub/c.yml", "data: '" + text + "'")).data; };
  EXPECT_EQ(data("[artist] set"), sub + "[artist] set");
  EXPECT_EQ(data("a, b"), sub + "a, b");
  EXPECT_EQ(data("a, a, b/c, d.bin, x"), sub + "a," + sub + "a, b/c, d.bin," + sub + "x");
  const Places p = places(write("sub/c.yml", "output: runs, new\nfiles: ['a, b/c, d.bin']\n"));
  EXPECT_EQ(p.output, "runs, new");
  EXPECT_EQ(p.files, std::vector<std::string>{sub + "a, b/c, d.bin"});
  // On the command line, where a list may be typed in brackets, too.
  const auto files = [&](const std::string& word) { return places(write("sub/c.yml", ""), {"files=" + word}).files; };
  const std::string in = folder_.path() + "/";
  EXPECT_EQ(files("[x] " + in + "c.bin"), std::vector<std::string>{"[x] " + in + "c.bin"});
  EXPECT_EQ(files("[" + in + "a, b.bin]"), (std::vector<std::string>{in + "a", "b.bin"}));
  std::ofstream("[here].bin") << "", std::ofstream("(here)") << "";
  EXPECT_EQ(files("[here].bin"), std::vector<std::string>{"[here].bin"});
  EXPECT_EQ(files("(here)"), std::vector<std::string>{"(here)"});
  EXPECT_EQ(files("['(here)']"), std::vector<std::string>{"(here)"});
  std::filesystem::remove("[here].bin"), std::filesystem::remove("(here)");
  Places absolute{.data = sub + "a, b", .output = "runs, new"};
  KeyList keys;
  keys.add(absolute);
  keys.make_paths_absolute();
  EXPECT_EQ(absolute.data, sub + "a, b");
  EXPECT_EQ(absolute.output, std::filesystem::current_path().string() + "/runs, new");
}

TEST_F(ConfigFiles, InputsInTheWorkingFolderAreUsedAndLogged) {
  std::ofstream("only_here.bin") << "";
  const std::string file = write("a.yml", "\ndata: only_here.bin\n");
  testing::internal::CaptureStderr();
  EXPECT_EQ(places(file).data, "only_here.bin");
  const std::string log = testing::internal::GetCapturedStderr();
  std::filesystem::remove("only_here.bin");
  EXPECT_TRUE(contains(log, "config: " + file + ":2: data 'only_here.bin' is not in '" + folder_.path() +
                                "'; the one in the working folder is used"))
      << log;
}

TEST_F(ConfigFiles, TildesAreTheHomeAndNoneIsNothing) {
  const std::string home = std::getenv("HOME");
  const Places p = places(write("a.yml", "data: ~/a,~/b\noutput: ~/x\ntext: ~/x\nmodel: None\n"), {"cache=~"});
  EXPECT_EQ(p.data, home + "/a," + home + "/b");
  EXPECT_EQ(p.output, home + "/x");
  EXPECT_EQ(p.text, "~/x");
  EXPECT_EQ(p.model, "");
  EXPECT_EQ(p.cache, home);
  EXPECT_EQ(places(write("b.yml", ""), {"data=None", "text=None"}).data, "");
  EXPECT_EQ(places(write("b.yml", ""), {"data=None", "text=None"}).text, "None");
}

TEST_F(ConfigFiles, PathsBecomeAbsoluteAndWordsStay) {
  Places p{.data = "a,gs://b/c", .model = "owner/name", .output = "runs/./x", .text = "a", .files = {"f", "/g"}};
  KeyList keys;
  keys.add(p);
  keys.make_paths_absolute();
  const std::string here = std::filesystem::current_path().string() + "/";
  EXPECT_EQ(p.data, here + "a,gs://b/c");
  EXPECT_EQ(p.model, "owner/name");
  EXPECT_EQ(p.output, here + "runs/x");
  EXPECT_EQ(p.cache, "off");
  EXPECT_EQ(p.text, "a");
  EXPECT_EQ(p.files, (std::vector<std::string>{here + "f", "/g"}));
}

TEST_F(ConfigFiles, CircleNamesTheChain) {
  write("b.yml", "base: sub/c.yml\n");
  write("sub/c.yml", "base: ../a.yml\n");
  std::string a = write("a.yml", "base: b.yml\n");
  try {
    ConfigSource::load(a, {});
    FAIL();
  } catch (const Error& e) {
    std::string in = folder_.path();
    EXPECT_TRUE(contains(e.what(), in + "/a.yml → " + in + "/b.yml → " + in + "/sub/c.yml → " + in + "/a.yml"))
        << e.what();
  }
}

TEST_F(ConfigFiles, MissingFilesAreNamed) {
  std::string child = write("child.yml", "base: nowhere.yml\n");
  try {
    ConfigSource::load(child, {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_TRUE(contains(e.what(), "nowhere.yml")) << e.what();
    EXPECT_TRUE(contains(e.what(), "named by `base:` in " + child)) << e.what();
  }
  EXPECT_THROW(ConfigSource::load(folder_ / "none.yml", {}), Error);
  EXPECT_THROW(ConfigSource::load(folder_.path(), {}), Error);
}

TEST_F(ConfigFiles, KeyWrittenTwiceWarnsWithBothLines) {
  std::string file = write("twice.yml", "limit: 1\nrun_name: a\nlimit: 2\n");
  testing::internal::CaptureStderr();
  ConfigSource source = ConfigSource::load(file, {"run_name=b", "run_name=c"});
  std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(source.values().at("limit").text, "2");
  EXPECT_TRUE(contains(log, "limit is written twice: " + file + ":1 and " + file + ":3")) << log;
  EXPECT_FALSE(contains(log, "run_name")) << log;
}

TEST(Config, PrintedTextReadsBack) {
  std::mt19937_64 rng(1);
  auto number = [&](uint64_t n) { return static_cast<int64_t>(rng() % n); };
  const std::vector<std::string> awkward = {
      "",     "1",       "-1",     "1e-8", "0x10", "12:30:45", "2024-01-01", "true",   "No",  "null",
      "~",    "None",    "y",      "- a",  "a: b", "a #b",     "#b",         "'",      "\"",  "\\",
      "[a]",  "{a: 1}",  "[a",     "(1,)", " a ",  "a\nb",     "a\tb",       "@x",     "`x`", "%x",
      "!tag", "&anchor", "*alias", "|",    ">",    "?",        "=",          ".inf",   "nan", "été",
      "日本", "🍎",       "\x7f",   "a,b",  "---",  "...",      "base",       "/a/b.c", "<<",  "\x01"};
  auto text = [&] {
    if (number(2)) return awkward[number(awkward.size())];
    std::string s;
    for (int64_t i = number(12); i > 0; --i) s += static_cast<char>(' ' + number(95));
    return s;
  };
  auto real = [&] {
    double d;
    do {
      uint64_t bits = rng();
      std::memcpy(&d, &bits, sizeof d);
    } while (!is_number(d));
    return number(2) ? d : static_cast<double>(number(100));
  };
  const std::vector<std::string> values = {
      "1", "-2.5", "true", "null", R"("a\"b\n")", R"("1")", R"([1, {"x": "y: z"}])", "{}"};
  auto json = [&] { return values[number(values.size())]; };
  for (int round = 0; round < 2000; ++round) {
    Sample s;
    s.flag = number(2);
    s.steps = static_cast<int64_t>(rng());
    s.rate = real();
    s.run_name = text();
    if (number(2)) s.limit = static_cast<int64_t>(rng());
    if (number(2)) s.share = real();
    if (number(2)) s.choice = number(2);
    s.axes.clear();
    for (int64_t i = number(4); i > 0; --i) s.axes.push_back(text());
    for (int64_t i = number(4); i > 0; --i) s.sizes.push_back(static_cast<int64_t>(rng()));
    for (int64_t i = number(4); i > 0; --i) s.ratios.push_back(real());
    for (int64_t i = number(4); i > 0; --i) s.bias[text()] = json();
    Sample other =
        parse("", {"logical_axis_rules=[['a', [b, 1, true, null, '2']], {x: " + std::to_string(round) + "}]"});
    if (number(2)) s.rules = other.rules;
    std::string yaml = print(s);
    ASSERT_EQ(parse(yaml), s) << yaml;
    ASSERT_EQ(print(parse(yaml)), yaml);
  }
}

TEST(Config, PrintedTextIsSortedAndPlainWherePossible) {
  Sample s = parse("timestep_bias: {strategy: later, portion: 0.25}\nlearning_rate: 2");
  std::string yaml = print(s);
  EXPECT_TRUE(contains(yaml, "learning_rate: 2.0\n")) << yaml;
  EXPECT_TRUE(contains(yaml, "mesh_axes: [data, fsdp]\n")) << yaml;
  EXPECT_TRUE(contains(yaml, "timestep_bias: {portion: 0.25, strategy: \"later\"}\n")) << yaml;
  EXPECT_LT(yaml.find("enable_profiler"), yaml.find("limit"));
}

TEST(Config, DeclaringAKeyTwiceIsOurOwnError) {
  Sample s;
  KeyList keys;
  keys.add(s);
  EXPECT_THROW(keys.add(s), Error);
}

TEST(Nearest, FindsTyposAndKeepsSilentOtherwise) {
  std::vector<std::string> known = {"learning_rate", "max_train_steps", "seed", "height"};
  EXPECT_EQ(nearest("learnign_rate", known), "learning_rate");
  EXPECT_EQ(nearest("max_train_step", known), "max_train_steps");
  EXPECT_EQ(nearest("--seed", known), "seed");
  EXPECT_EQ(nearest("sede", known), "seed");
  EXPECT_EQ(nearest("guidance", known), "");
  EXPECT_EQ(nearest("x", known), "");
  EXPECT_EQ(nearest("MAX_TRAIN_STEPS", known), "max_train_steps");
  EXPECT_EQ(nearest("Sede", known), "seed");
  EXPECT_EQ(nearest("foo", {"fps"}), "");
}

TEST(Config, HintReplacesTheSuggestion) {
  Sample s;
  KeyList keys;
  keys.add(s);
  try {
    keys.assign(ConfigSource::from_text("learning_rat: 1"), {{"learning_rat", "here it is `x`"}});
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "config: text:1: there is no key `learning_rat`\n  here it is `x`");
  }
}

TEST(KeyChanges, NameWhatDiffersFromItsDefault) {
  Sample s;
  const KeyChanges none(s);
  for (const char* key : {"run_name", "limit", "mesh_axes", "logical_axis_rules"}) EXPECT_FALSE(none.changed(key));
  s.limit = 3;
  s.axes = {"data"};
  s.flag = true;
  const KeyChanges changes(s);
  for (const char* key : {"limit", "mesh_axes", "enable_profiler"}) EXPECT_TRUE(changes.changed(key)) << key;
  EXPECT_FALSE(changes.changed("max_train_steps"));
  EXPECT_EQ(changes.value("mesh_axes"), "[data]");
  EXPECT_EQ(changes.value("max_train_steps"), "10");
  try {
    changes.changed("max_steps");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::internal);
  }
}

/// Keys with ranges of valid values.
struct Limited {
  double part = 0.5, decay = 0.9, shift = 1, rate = 1, least = 0;
  int64_t count = 1;
  std::optional<int64_t> seed;
  std::optional<double> scale;
  std::vector<int64_t> crops;
  std::string method = "fast", form;

  template <class V>
  void visit(V&& v) {
    v("part", part, "a part", in_range(0, 1));
    v("decay", decay, "a decay", in_range(0, below(1)));
    v("shift", shift, "a shift", finite());
    v("rate", rate, "a rate", at_least(above(0)));
    v("least", least, "a bound", at_most(1));
    v("count", count, "a count", in_range(1, 1024));
    v("seed", seed, "a seed; -1: any", at_least(-1));
    v("scale", scale, "a factor", at_least(0));
    v("crops", crops, "offsets", at_least(0));
    v("method", method, "how", one_of({"fast", "careful"}));
    v("form", form, "what; empty: either", one_of_or_empty({"png", "mp4"}));
  }
};

/// The error message for a command-line word, or "accepted".
std::string outcome_of(const std::string& word, const std::string& yaml = "") {
  Limited l;
  KeyList keys;
  keys.add(l);
  try {
    keys.assign(ConfigSource::from_text(yaml, word.empty() ? std::vector<std::string>() : std::vector{word}));
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

TEST(KeyRange, EndsAreValidAndOthersRefusedWithTheRange) {
  for (const char* word : {"part=0", "part=1", "decay=0", "decay=0.999999", "shift=-1e15", "shift=1e15", "rate=1e-300",
                           "least=1", "least=-1e15", "count=1", "count=1024", "seed=-1", "seed=null", "scale=0",
                           "scale=null", "crops=[]", "crops=0,7"})
    EXPECT_EQ(outcome_of(word), "accepted") << word;
  const std::pair<const char*, const char*> refused[] = {
      {"part=-1e-9", "part is `-1e-9`, expected a number, 0 to 1"},
      {"part=1.0001", "part is `1.0001`, expected a number, 0 to 1"},
      {"decay=1", "decay is `1`, expected a number, at least 0 and below 1"},
      {"decay=-0.1", "decay is `-0.1`, expected a number, at least 0 and below 1"},
      {"rate=0", "rate is `0`, expected a finite number, above 0"},
      {"least=1.5", "least is `1.5`, expected a finite number, up to 1"},
      {"count=0", "count is `0`, expected a whole number, 1 to 1024"},
      {"count=1025", "count is `1025`, expected a whole number, 1 to 1024"},
      {"seed=-2", "seed is `-2`, expected a whole number, -1 or more, or null"},
      {"scale=-0.5", "scale is `-0.5`, expected a finite number, 0 or more, or null"},
      {"crops=0,-1", "crops is `0,-1`, expected a list of whole numbers, as in [1, 2], each 0 or more"}};
  for (const auto& [word, text] : refused)
    EXPECT_TRUE(outcome_of(word).starts_with(fmt::format("config: command line: {}\n", text))) << outcome_of(word);
  EXPECT_EQ(outcome_of("", "part: 0.5\nseed: -2\n"),
            "config: text:2: seed is `-2`, expected a whole number, -1 or more, or null\n  seed: a seed; -1: any");
  for (const char* key : {"part", "decay", "shift", "rate", "least", "scale", "count", "crops"})
    for (const char* value : {"nan", "inf", "-inf", ".inf"})
      EXPECT_TRUE(contains(outcome_of(fmt::format("{}={}", key, value)), "expected a")) << key << value;
  EXPECT_TRUE(contains(outcome_of("shift=inf"), "expected a finite number\n"));
  EXPECT_TRUE(contains(outcome_of("shift=1e38"), "shift is `1e38`"));
  EXPECT_TRUE(contains(outcome_of("", "shift: 1e38"), "numbers are finite and at most 1e+15 in size"));
}

struct Seeded {
  Seed seed = 3;
  std::optional<Seed> other;
  template <class V>
  void visit(V&& v) {
    v("seed", seed, "a seed");
    v("other", other, "a seed or none");
  }
};

TEST(SeedKey, SeedsHaveSixtyFourBits) {
  Seeded s;
  KeyList keys;
  keys.add(s);
  const auto set = [&](const std::string& yaml, const std::vector<std::string>& words) {
    keys.assign(ConfigSource::from_text(yaml, words));
    return keys.values();
  };
  EXPECT_EQ(set("seed: 18446744073709551615", {"other=9223372036854775808"}),
            (std::map<std::string, std::string>{{"seed", "18446744073709551615"}, {"other", "9223372036854775808"}}));
  EXPECT_EQ(s.seed.value(), ~uint64_t{0});
  EXPECT_FALSE(s.seed.is_random());
  EXPECT_NE(s.seed, Seed(-1));
  EXPECT_EQ(set("seed: -1", {"other=null"}), (std::map<std::string, std::string>{{"seed", "-1"}, {"other", "null"}}));
  EXPECT_TRUE(s.seed.is_random());
  set("seed: 1e3", {});
  EXPECT_EQ(s.seed, Seed(1000));
  for (const char* text : {"-2", "18446744073709551616", "1.5", "-9223372036854775809", "one", "1e19"})
    for (const char* key : {"seed", "other"})
      EXPECT_THROW(set("", {std::string(key) + "=" + text}), Error) << key << text;
  try {
    set("", {"seed=18446744073709551616"});
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_FALSE(contains(e.what(), "1e+15")) << e.what();  // the limit of other numbers
  }
}

struct Switched {
  double most = 0.5;
  template <class V>
  void visit(V&& v) {
    v("most", most, "a number; true: 1", or_switch(at_least(0)));
  }
};

TEST(KeyRange, ANumberMayAlsoBeASwitch) {
  for (const auto& [text, value] :
       std::map<std::string, double>{{"true", 1}, {"True", 1}, {"false", 0}, {"1", 1}, {"0.25", 0.25}})
    for (const bool yaml : {true, false}) {
      Switched s;
      KeyList keys;
      keys.add(s);
      keys.assign(yaml ? ConfigSource::from_text("most: " + text) : ConfigSource::from_text("", {"most=" + text}));
      EXPECT_EQ(s.most, value) << text;
    }
  EXPECT_TRUE(contains(outcome_of("scale=true"), "scale is `true`"));
}

TEST(KeyRange, NumbersOfOtherSourcesAreFinite) {
  Sample s;
  check_numbers(s);
  const auto refused = [](const Sample& its) -> std::string {
    try {
      check_numbers(its);
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  s.share = 1e38;
  EXPECT_EQ(refused(s), "share is 1e+38; expected a finite number of at most 1e+15 in size");
  s.share.reset(), s.ratios = {1, std::nan("")};
  EXPECT_EQ(refused(s), "ratios is nan; expected a finite number of at most 1e+15 in size");
  s.ratios = {}, s.rate = -1e16;
  EXPECT_EQ(refused(s), "learning_rate is -1e+16; expected a finite number of at most 1e+15 in size");
}

TEST(KeyWords, AWordOfNoListIsRefusedWithTheListAndTheNearest) {
  for (const char* word : {"method=careful", "form=png", "form="}) EXPECT_EQ(outcome_of(word), "accepted") << word;
  EXPECT_EQ(outcome_of("", "form: null"), "accepted");
  EXPECT_EQ(outcome_of("method=carefull"),
            "config: command line: method is `carefull`, expected one of: fast, careful\n  did you mean `careful`?\n"
            "  method: how");
  EXPECT_EQ(outcome_of("", "form: jpg"),
            "config: text:1: form is `jpg`, expected one of: png, mp4, or empty\n"
            "  form: what; empty: either");
  for (const char* word : {"method=", "method=FAST", "form=fast"})
    EXPECT_TRUE(contains(outcome_of(word), "expected one of: ")) << word;
}

TEST(ConfigKey, LineHasDefaultMeaningAndRange) {
  Limited l;
  KeyList keys;
  keys.add(l);
  std::string lines;
  for (const ConfigKey& key : keys.keys()) lines += key.line() + "\n";
  EXPECT_EQ(lines,
            "part: 0.5  # a part [0 to 1]\n"
            "decay: 0.9  # a decay [at least 0 and below 1]\n"
            "shift: 1.0  # a shift\n"
            "rate: 1.0  # a rate [above 0]\n"
            "least: 0.0  # a bound [up to 1]\n"
            "count: 1  # a count [1 to 1024]\n"
            "seed: null  # a seed; -1: any [-1 or more]\n"
            "scale: null  # a factor [0 or more]\n"
            "crops: []  # offsets [0 or more]\n"
            "method: fast  # how [one of: fast, careful]\n"
            "form: \"\"  # what; empty: either [one of: png, mp4, or empty]\n");
}

struct SecretKeys {
  std::string token;
  template <class V>
  void visit(V&& v) {
    v("token", token, "a token", Secret());
  }
};

TEST(Config, ErrorsDoNotPrintSecrets) {
  for (const char* yaml : {"token: [hunter2, b]", "token: {hunter2: b}", "token:\n  - hunter2\n"}) {
    SecretKeys its;
    KeyList keys;
    keys.add(its);
    try {
      keys.assign(ConfigSource::from_text(yaml));
      ADD_FAILURE() << yaml;
    } catch (const Error& e) {
      EXPECT_FALSE(contains(e.what(), "hunter2")) << e.what();
      EXPECT_TRUE(contains(e.what(), "token is a ")) << e.what();
    }
  }
  SecretKeys its;
  KeyList keys;
  keys.add(its);
  keys.assign(ConfigSource::from_text("token: 12345"));
  EXPECT_EQ(its.token, "12345");
}

}  // namespace
}  // namespace md
