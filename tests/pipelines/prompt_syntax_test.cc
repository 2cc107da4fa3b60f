// Parsing of weighted prompts; tests/golden/prompts covers their embeddings.
#include "maxdiffusion/encoders/prompt_syntax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/encoders/prompt_schedule.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/tokenizers/placeholders.h"
#include "maxdiffusion/tokenizers/tokenizer.h"
#include "tests/cli/command.h"
#include "tests/one_device.h"

namespace md {
namespace {

/// Formats a prompt as parsed: "red*1.1|BREAK|…", weights with four digits.
std::string read_as(const std::string& syntax, const std::string& prompt) {
  std::string out;
  for (const WeightedText& p : parse_weights(syntax, prompt))
    out += (out.empty() ? "" : "|") + (p.breaks ? "BREAK" : fmt::format("{}*{:.4g}", p.text, p.weight));
  return out;
}

TEST(PromptSyntax, OfA1111IsReadAsItDefines) {
  for (const auto& [prompt, parts] : std::vector<std::pair<std::string, std::string>>{
           {"normal text", "normal text*1"},
           {"an (important) word", "an *1|important*1.1| word*1"},
           {"(unbalanced", "unbalanced*1.1"},
           {"\\(literal\\]", "(literal]*1"},
           {"(unnecessary)(parens)", "unnecessaryparens*1.1"},
           {"a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            "a *1|house*1.573| *1.1|on*1| a *1.1|hill*0.55|, sun, *1.1|sky*1.464|.*1.1"},
           {"red BREAK blue\nBREAK", "red*1|BREAK|blue*1|BREAK|*1"},
           {"(red BREAK blue:1.2)", "red*1.2|BREAK|blue*1.2"},
           {"BREAKING NOBREAK", "BREAKING NOBREAK*1"},
           {"a:b :1.5) c]", "a:b :1.5) c]*1"},
           {"(a: -.5 )", "a*-0.5"},
           {"", ""}})
    EXPECT_EQ(read_as("a1111", prompt), parts) << prompt;
}

TEST(PromptSyntax, OfComfyUiIsReadAsItDefines) {
  for (const auto& [prompt, parts] :
       std::vector<std::pair<std::string, std::string>>{{"an (important) word", "an *1|important*1.1| word*1"},
                                                        {"[a] ((b))", "[a] *1|b*1.21"},
                                                        {"(a (b:1.5) c:0.5)", "a *0.5|b*1.5| c*0.5"},
                                                        {"(unbalanced", "(unbalanced*1"},
                                                        {"\\(literal\\) (x\\):2)", "(literal) *1|x)*2"},
                                                        {"(a:b) BREAK", "a:b*1.1| BREAK*1"},
                                                        {"(a:1e-1)", "a*0.1"},
                                                        {"(a:nan)", "a:nan*1.1"}})
    EXPECT_EQ(read_as("comfyui", prompt), parts) << prompt;
}

TEST(PromptSyntax, WeightsThatMultiplyToMoreThanEmbeddingsHoldAreRefused) {
  for (const auto& [syntax, prompt] : std::vector<std::pair<std::string, std::string>>{
           {"a1111", std::string(8000, '(') + "cat" + std::string(8000, ')')},  // 1.1^8000 is infinite
           {"a1111", "((cat:1000):1001)"},
           {"comfyui", "(cat:-1e7)"}}) {
    try {
      parse_weights(syntax, prompt);
      FAIL() << prompt;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_TRUE(contains(e.message(), "prompt: the weights around \"cat\" multiply to ")) << e.message();
    }
  }
}

TEST(PromptSchedule, GivesTheTextsOfA1111InEveryStep) {
  int changing = 0;
  for (const nlohmann::json& c : parse_json(read_file(MD_SOURCE_DIR "/tests/golden/prompts/schedules.json"))) {
    const PromptSchedule schedule(c.at("prompt").get<std::string>());
    const auto steps = c.at("steps").get<int64_t>();
    const auto texts = c.at("texts").get<std::vector<std::string>>();  // of two passes
    ASSERT_EQ(std::ssize(texts), 2 * steps);
    for (size_t i = 0; i < texts.size(); ++i)
      EXPECT_EQ(schedule.at(static_cast<int64_t>(i), steps), texts[i])
          << c.at("prompt") << " step " << i << "/" << steps;
    const bool differs = std::ranges::any_of(texts, [&](const std::string& t) { return t != texts[0]; });
    EXPECT_TRUE(schedule.changes() || !differs) << c.at("prompt");
    changing += differs ? 1 : 0;
  }
  EXPECT_GT(changing, 60);
}

TEST(PartsOfPrompts, AreThoseOfA1111) {
  const auto read = [](const std::string& prompt) {
    std::string out;
    for (const PartOfPrompt& p : parts_of_prompt(prompt)) out += fmt::format("{}*{}|", p.text, p.weight);
    return out;
  };
  for (const auto& [prompt, parts] : std::map<std::string, std::string>{
           {"cat :1.2 AND dog:.8", "cat*1.2| dog*0.8|"},
           {"a (red:1.3) cat AND [a:b:0.5] AND x: -1. ", "a (red:1.3) cat*1| [a:b:0.5]*1| x*-1|"},
           {"cat AND", "cat*1|*1|"},
           {"AND cat", "*1| cat*1|"},
           {"SAND and AND_B, BRAND", "SAND and AND_B, BRAND*1|"},
           {"ratio 16:9", "ratio 16:9*1|"},  // the web UI takes 9 as a weight, also without AND
           {"one\nline :2 ANDAND AND two\nlines :3", "one\nline :2 ANDAND*1| two\nlines*3|"}})
    EXPECT_EQ(read(prompt), parts);
}

TEST(PromptSchedule, ReadsDeepAndLongTextsInLittleTime) {
  const std::string deep = std::string(20000, '[') + "a:b:3]", wide(20000, '|');
  EXPECT_FALSE(PromptSchedule(wide).changes());
  EXPECT_TRUE(PromptSchedule(deep).changes());
  EXPECT_EQ(PromptSchedule(deep).at(3, 4), std::string(19999, '[') + "b");
}

TEST(PromptSyntax, ChunksAreOfSeventyFiveTokensAndEndAfterCommasOfA1111) {
  const auto tokenizer = open_tokenizer("CLIPTokenizer", MD_SOURCE_DIR "/tests/golden/pipelines/sd/tokenizer");
  auto sizes = [&](const std::string& syntax, const std::string& prompt) {
    std::vector<int64_t> out;
    for (const TokenChunk& c : token_chunks(syntax, prompt, *tokenizer, 77)) {
      EXPECT_EQ(c.ids.size(), 77u);
      EXPECT_EQ(c.weights.size(), 77u);
      out.push_back(std::ranges::find(c.ids.begin() + 1, c.ids.end(), tokenizer->end_id()) - c.ids.begin() - 1);
    }
    return out;
  };
  auto reds = [](int n) {
    std::string s;
    for (int i = 0; i < n; ++i) s += "red ";
    return s;
  };
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes("a1111", ""), Sizes{0});
  EXPECT_EQ(sizes("a1111", reds(75)), Sizes{75});
  EXPECT_EQ(sizes("a1111", reds(76)), (Sizes{75, 1}));
  EXPECT_EQ(sizes("a1111", reds(60) + ", " + reds(20)), (Sizes{61, 20}));
  EXPECT_EQ(sizes("a1111", reds(50) + ", " + reds(30)), (Sizes{75, 6}));  // the comma is too far back
  EXPECT_EQ(sizes("a1111", "red BREAK blue"), (Sizes{1, 1}));
  EXPECT_EQ(sizes("comfyui", reds(76)), (Sizes{75, 1}));
  EXPECT_EQ(sizes("comfyui", reds(72) + "(" + reds(5) + ":1.2)"),
            (Sizes{72, 5}));  // short weighted spans are not split
  EXPECT_EQ(sizes("comfyui", reds(72) + "(" + reds(8) + ":1.2)"), (Sizes{75, 5}));
}

TEST(PromptSyntax, VectorsOfOneWordStayInOneChunk) {
  const auto tokenizer = with_placeholders(
      open_tokenizer("CLIPTokenizer", MD_SOURCE_DIR "/tests/golden/pipelines/sd/tokenizer"), {{"<dog>", 3}}, 1000);
  std::string reds;
  for (int n = 0; n < 73; ++n) reds += "red ";
  for (const std::string syntax : {"a1111", "comfyui"}) {
    const std::vector<TokenChunk> chunks = token_chunks(syntax, reds + "(<dog>:1.3)", *tokenizer, 77);
    ASSERT_EQ(chunks.size(), 2u) << syntax;
    EXPECT_EQ(chunks[0].ids[74], tokenizer->end_id());
    for (const size_t i : {1, 2, 3}) {
      EXPECT_EQ(chunks[1].ids[i], 999 + static_cast<int32_t>(i));
      EXPECT_EQ(chunks[1].weights[i], 1.3f);
    }
    EXPECT_EQ(chunks[1].ids[4], tokenizer->end_id());
  }
}

TEST(PromptSyntax, IsRefusedWhereItMeansNothing) {
  TemporaryFolder t;
  auto sample = [&](const std::string& model, const std::vector<std::string>& extra) {
    std::vector<std::string> words = {"generate",
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/" + model,
                                      "output_dir=" + (t / "out"),
                                      "output_type=latent",
                                      "height=16",
                                      "width=16",
                                      "num_inference_steps=2",
                                      "max_sequence_length=12"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  };
  Outcome o = sample("flux/dev", {"prompt=heart", "prompt_syntax=a1111"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(
      contains(o.err, "prompt_syntax is a1111; expected plain: this model's text encoders are not CLIP's alone"))
      << o.err;
  o = sample("pipelines/sd", {"prompt=(heart:1.2.3)", "prompt_syntax=a1111"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "prompt: the weight '1.2.3' in \"(heart:1.2.3)\"; expected a number")) << o.err;
  o = sample("pipelines/sd",
             {"prompt=" + std::string(200, '(') + "heart" + std::string(200, ')'), "prompt_syntax=comfyui"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "prompt: more than 100 nested brackets; expected fewer")) << o.err;
  o = sample("pipelines/sd", {"prompt=heart", "prompt_syntax=compel"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "prompt_syntax")) << o.err;
}

const std::string kShort = "red heart", kTwo = "(red:1.3) BREAK blue", kThree = "heart BREAK red BREAK [blue] sky";

TEST(PromptsOfUnequalChunks, AreAsLongAsTheLongestInOneBatch) {
  const OpenedModel model = open_model(MD_SOURCE_DIR "/tests/golden/pipelines/sd", {}, {.purpose = Purpose::sampling});
  TextEncoder text(
      one_device(), model.family, 1,
      [&](const ParamTable& params, const std::string& component) { return model.weights.read(params, component); }, {},
      {});
  const auto encoded = [&](const std::vector<std::string>& prompts) {
    return encode_weighted(text, *model.family, "a1111", prompts, {}, 0, 1);
  };
  const auto rows_of = [](const HostArrays& e) {
    const auto v = e.at(FamilySpec::kChunkRows).view<int32_t>();
    return std::vector<int32_t>(v.begin(), v.end());
  };
  HostArrays all = encoded({kShort, kTwo, kThree}), repeated = encoded({kShort, kThree}), two = encoded({kTwo});
  EXPECT_EQ(all.at("prompt_embeds").dims()[1], 3 * 77);
  EXPECT_EQ(rows_of(all), (std::vector<int32_t>{77, 2 * 77, 3 * 77}));
  EXPECT_EQ(repeated.at("prompt_embeds").dims()[1], 3 * 77);
  EXPECT_FALSE(repeated.contains(FamilySpec::kChunkRows));  // one chunk, three times
  make_equally_long(model.family->spec(), repeated, two);
  EXPECT_EQ(rows_of(repeated), (std::vector<int32_t>{3 * 77, 3 * 77}));
  EXPECT_EQ(rows_of(two), (std::vector<int32_t>{2 * 77}));
  EXPECT_EQ(two.at("prompt_embeds").dims()[1], 3 * 77);
}

class PromptsOfUnequalLengths : public testing::TestWithParam<const char*> {};

TEST_P(PromptsOfUnequalLengths, GiveInOneBatchWhatEachGivesAlone) {
  const std::string folder = GetParam();
  const bool chunks = folder.starts_with("pipelines/");
  PipelineOptions options;
  options.layers.activations_dtype = "float32", options.layers.precision = "HIGHEST";
  options.compile.xla_flags = "--xla_backend_optimization_level=0";
  options.batch.per_device = 3;
  if (folder.starts_with("flux2")) options.model.text_encoder_out_layers = {1, 2, 3};
  if (folder.starts_with("flux/") || folder.starts_with("wan")) options.model.max_sequence_length = 24;
  DiffusionPipeline pipeline = DiffusionPipeline::load(MD_SOURCE_DIR "/tests/golden/" + folder, options);
  SampleRequest r;
  r.prompt = {kShort, kTwo, kThree}, r.seeds = {5, 6, 7};
  r.height = r.width = 32, r.num_inference_steps = 3, r.guidance_scale = 4, r.true_cfg_scale = 2, r.decode = false;
  if (folder.starts_with("wan")) r.num_frames = 5;
  if (!chunks)  // more rows than others need alone (FamilySpec::text_rows)
    for (int i = 0; i < 40; ++i) r.prompt[2] += " red heart,";
  if (chunks) {
    r.prompt_syntax = "a1111";
    r.scheduler.diffusion_scheduler_config = {{"_class_name", R"("EulerDiscreteScheduler")"}};
  }
  for (const bool negative : {true, false}) {  // without one SDXL's is 0
    r.negative_prompt = {kTwo, kShort, kThree};
    if (!negative) r.negative_prompt.clear();
    const std::vector<double> together = pipeline.generate(r).latents.to_doubles();
    const size_t each = together.size() / 3;
    double largest = 1;
    for (const double v : together) largest = std::max(largest, std::abs(v));
    for (size_t i = 0; i < 3; ++i) {
      SampleRequest alone = r;
      alone.prompt = {r.prompt[i]}, alone.sample_seed = r.seeds[i], alone.seeds.clear();
      if (negative) alone.negative_prompt = {r.negative_prompt[i]};
      const std::vector<double> want = pipeline.generate(alone).latents.to_doubles();
      ASSERT_EQ(want.size(), each);
      double worst = 0;
      for (size_t k = 0; k < each; ++k) worst = std::max(worst, std::abs(together[i * each + k] - want[k]));
      EXPECT_LT(worst, 2e-5 * largest) << i << (negative ? " with a negative prompt" : "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PromptsOfUnequalLengths,
                         testing::Values("pipelines/sd", "pipelines/sdxl", "flux/dev", "flux2/base", "zimage/base",
                                         "qwenimage/base", "wan/t2v"),
                         [](const auto& info) {
                           return std::regex_replace(std::string(info.param), std::regex("\\W"), "_");
                         });

}  // namespace
}  // namespace md
