// Each key that names a type or a precision changes only what it names in the program of a training step. The test
// reads the program's text without compiling it, on two devices, where our kernels do not compute convolutions.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "tests/cli/command.h"

namespace md {
namespace {

using Types = std::set<std::string>;

/// Types and precisions of one model in the program text.
struct Model {
  Types weights;     // types of the parameters
  Types products;    // operand types of products, convolutions and attention, except those in `named`
  Types precisions;  // in the program's spelling
  bool operator==(const Model&) const = default;
};
void PrintTo(const Model& m, std::ostream* os) {
  auto list = [&](const char* name, const Types& types) {
    *os << name;
    for (const std::string& t : types) *os << ' ' << t;
    *os << "; ";
  };
  list("weights", m.weights), list("products", m.products), list("precisions", m.precisions);
}

struct Step {
  std::map<std::string, Model> models;  // unet, text_encoder, vae
  Types moments, masters;
  std::map<std::string, Types> named;  // UNet products by the end of their layer's name
  bool operator==(const Step&) const = default;
};

std::string model_of(const std::string& layer) {
  if (layer.starts_with("text_model.")) return "text_encoder";
  return layer.starts_with("encoder.") || layer.starts_with("quant_conv") ? "vae" : "unet";
}

/// The text between `before` and `after`, searched from `from`, which moves behind it; empty if there is none.
std::string between(const std::string& text, const std::string& before, const std::string& after, size_t& from) {
  const size_t start = text.find(before, from),
               end = start == text.npos ? start : text.find(after, start + before.size());
  if (end == text.npos) return from = text.npos, "";
  from = end;
  return text.substr(start + before.size(), end - start - before.size());
}

/// The element type of the next tensor: "f32" of "tensor<2x8x8xf32>".
std::string element(const std::string& text, size_t& from) {
  const std::string shape = between(text, "tensor<", ">", from);
  return shape.substr(shape.rfind('x') + 1);
}

/// Parses "%arg5: tensor<8x3x3x3xf32> {…} loc("vae/encoder.conv_in.weight"), …".
void add_arguments(Step& step, const std::string& line) {
  for (size_t at = line.find("%arg"); at < line.find(") -> ("); at = line.find("%arg", at)) {
    const std::string type = element(line, at), name = between(line, "loc(\"", "\")", at),
                      first = name.substr(0, name.find('/'));
    if (first == "unet" || first == "vae" || first == "text_encoder") step.models[first].weights.insert(type);
    if (first == "adam_m" || first == "adam_v") step.moments.insert(type);
    if (first == "master") step.masters.insert(type);
  }
}

/// Parses "%9 = "stablehlo.dot_general"(%7, %8) {…} : (tensor<…>, tensor<…>) -> tensor<…> loc(#loc5)".
void add_product(Step& step, const std::string& line, const std::map<std::string, std::string>& layers) {
  size_t types = line.rfind(" : (tensor<"), place = line.rfind(" loc(");
  const Types operands = {element(line, types), element(line, types)};
  const std::string layer = layers.at(between(line, "loc(", ")", place)), model = model_of(layer);
  size_t at = 0;
  for (std::string p; !(p = between(line, "#stablehlo<precision ", ">", at)).empty();)
    step.models[model].precisions.insert(p);
  const std::string of = layer.substr(0, layer.find('/')), last = of.substr(of.rfind('.') + 1);
  const bool attention = last.starts_with("attn") && model == "unet";
  if (attention || of.starts_with("time_embedding.") || of == "conv_out")
    step.named[attention ? "attention" : of].insert(operands.begin(), operands.end());
  else
    step.models[model].products.insert(operands.begin(), operands.end());
}

Step step_of(const std::string& program) {
  Step step;
  std::map<std::string, std::string> layers;  // "#loc5": "conv_in/convolution"
  std::vector<std::string> products;
  std::istringstream lines(program);
  for (std::string line; std::getline(lines, line);) {
    size_t at = 0;
    if (line.find("func public @main(") != line.npos) add_arguments(step, line);
    if (line.starts_with("#loc")) layers[line.substr(0, line.find(' '))] = between(line, "loc(\"", "\")", at);
    for (const char* op : {"\"stablehlo.dot_general\"", "\"stablehlo.convolution\"", "\"md_attention"})
      if (line.find(op) != line.npos) products.push_back(line);
  }
  for (const std::string& line : products) add_product(step, line, layers);
  return step;
}

/// The training step of a tiny folder in float32 except for `words`. Traced for a plugin without our CPU kernels, so
/// that every product is an operation with visible types.
Step step_with(const std::vector<std::string>& words, const std::string& folder = "sd") {
  std::vector<std::string> all = {"inspect",
                                  "graph",
                                  MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                  "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/" + folder,
                                  "plugin=" MD_DEPS_DIR "/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
                                  "cpu_device_count=1",
                                  "dataset_type=synthetic",
                                  "synthetic_num_samples=4",
                                  "cache_latents_text_encoder_outputs=false",  // so that the step contains all models
                                  "resolution=16",
                                  "max_train_steps=1"};
  all.insert(all.end(), words.begin(), words.end());
  const Outcome o = maxdiffusion(all);
  EXPECT_EQ(o.status, 0) << o.err;
  return step_of(o.out);
}

const Types kWide = {"f32"}, kNarrow = {"bf16"}, kHalf = {"f16"}, kHighest = {"HIGHEST"};

Step all_wide() {
  const Model model{kWide, kWide, kHighest};
  return {{{"unet", model}, {"text_encoder", model}, {"vae", model}},
          kWide,
          {},
          {{"attention", kWide},
           {"conv_out", kWide},
           {"time_embedding.linear_1", kWide},
           {"time_embedding.linear_2", kWide}}};
}

void expect_equal(const Step& got, const Step& want, const std::string& word) {
  for (const auto& [name, model] : want.models) EXPECT_EQ(got.models.at(name), model) << word << ": " << name;
  EXPECT_EQ(got.models.size(), want.models.size()) << word;
  EXPECT_EQ(got.moments, want.moments) << word;
  EXPECT_EQ(got.masters, want.masters) << word;
  EXPECT_EQ(got.named, want.named) << word;
}

// S0-81, S0-84, S4-12…14
TEST(TypeKeys, ChangeWhatTheyNameAndNothingElse) {
  expect_equal(step_with({}), all_wide(), "float32");
  using Change = std::function<void(Step&)>;
  for (const auto& [word, change] : std::vector<std::pair<std::string, Change>>{
           {"weights_dtype=bfloat16", [](Step& s) { s.models["unet"].weights = kNarrow, s.masters = kWide; }},
           // Timesteps and the last convolution, before the loss, stay wide.
           {"activations_dtype=bfloat16",
            [](Step& s) { s.models["unet"].products = kNarrow, s.named["attention"] = kNarrow; }},
           {"text_encoder_dtype=bfloat16",
            [](Step& s) { s.models["text_encoder"].weights = s.models["text_encoder"].products = kNarrow; }},
           {"text_encoder_dtype=float16",
            [](Step& s) { s.models["text_encoder"].weights = s.models["text_encoder"].products = kHalf; }},
           {"vae_dtype=bfloat16", [](Step& s) { s.models["vae"].products = kNarrow; }},
           {"vae_weights_dtype=bfloat16", [](Step& s) { s.models["vae"].weights = kNarrow; }},
           {"precision=DEFAULT",
            [](Step& s) { for (auto& [name, model] : s.models) model.precisions = {"DEFAULT"}; }},
           {"precision=HIGH", [](Step& s) { for (auto& [name, model] : s.models) model.precisions = {"HIGH"}; }}}) {
    Step want = all_wide();
    change(want);
    expect_equal(step_with({word}), want, word);
  }
}

TEST(TypeKeys, WeightsAreTheirOwnMastersWhereRoundedAtRandom) {
  Step want = all_wide();
  want.models["unet"].weights = kNarrow;
  expect_equal(step_with({"weights_dtype=bfloat16", "low_precision_update=stochastic_rounding"}), want, "stochastic");
}

TEST(TypeKeys, AFolderMayAskForAttentionInFloat32) {
  Step want = all_wide();
  want.models["unet"].products = kNarrow;
  expect_equal(step_with({"activations_dtype=bfloat16"}, "sd2"), want, "upcast_attention");
}

}  // namespace
}  // namespace md
