// Guidance compared with diffusers' guiders (tools/golden/guidance.py), and its config keys.
#include "maxdiffusion/pipelines/guidance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "tests/cli/command.h"
#include "tests/one_device.h"

namespace md {
namespace {

using nlohmann::json;

GuidanceKeys keys_of(const json& j) {
  GuidanceKeys k;
  k.guidance_method = j.value("guidance_method", k.guidance_method);
  k.guidance_interval = j.value("guidance_interval", k.guidance_interval);
  k.apg_eta = j.value("apg_eta", k.apg_eta);
  k.apg_norm_threshold = j.value("apg_norm_threshold", k.apg_norm_threshold);
  k.apg_momentum = j.value("apg_momentum", k.apg_momentum);
  k.cfg_zero_init_steps = j.value("cfg_zero_init_steps", k.cfg_zero_init_steps);
  return k;
}

TEST(Guidance, IsThatOfTheGuidersOfDiffusers) {
  int steps = 0, unguided = 0;
  for (const json& r : parse_json(read_file(MD_SOURCE_DIR "/tests/golden/guidance.json"))) {
    SCOPED_TRACE(r["keys"].dump());
    const GuidanceKeys keys = keys_of(r["keys"]);
    const Shape shape{DType::f32, {2, 2, 2, 2}};
    auto floats = [&](const json& values) { return HostArray::of<float>(shape, values.get<std::vector<float>>()); };
    HostArray momentum = floats(std::vector<float>(16, 0));
    const auto n = static_cast<int64_t>(r["steps"].size());
    for (int64_t i = 0; i < n; ++i) {
      const json& step = r["steps"][static_cast<size_t>(i)];
      ++steps;
      // The golden of an unguided step is the prediction with the prompt; zero-init steps come first.
      EXPECT_EQ(keys.guides(i, n), step["guided"].get<bool>()) << i;
      if (!keys.guides(i, n)) {
        EXPECT_EQ(step["prediction"], step["positive"]);
        ++unguided;
        continue;
      }
      Graph g(one_device().graph_options());
      Tensor negative = g.input("negative", shape), positive = g.input("positive", shape),
             before = g.input("momentum", shape), number = g.input("step", {DType::s32, {}});
      const Guided out = guided(keys, constant(g, r["scale"], DType::f32), negative, positive, before);
      g.output("prediction", finished(keys, out.prediction, number));
      EXPECT_EQ(static_cast<bool>(out.momentum), keys.has_momentum());
      if (out.momentum) g.output("next", out.momentum);
      const auto at = static_cast<int32_t>(i);
      const auto found = evaluate(one_device(), g,
                                  {floats(step["negative"]), floats(step["positive"]), momentum,
                                   HostArray::of<int32_t>({DType::s32, {}}, {&at, 1})});
      if (found.size() > 1) momentum = found[1];
      const auto expected = step["prediction"].get<std::vector<double>>();
      const auto got = found[0].to_doubles();
      for (size_t k = 0; k < got.size(); ++k)
        EXPECT_NEAR(got[k], expected[k], 4e-6 * (1 + std::abs(expected[k]))) << "step " << i << " at " << k;
    }
  }
  EXPECT_EQ(steps, 50);
  EXPECT_EQ(unguided, 3);
}

TEST(Guidance, ChangesSamplesAndIsRefusedWhereItCannotBe) {
  TemporaryFolder t;
  auto sample = [&](std::vector<std::string> words, const std::string& model = "pipelines/sd") {
    words.insert(words.begin(), {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                 "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/" + model,
                                 "output_dir=" + (t / "out"), "output_type=latent", "prompt=heart", "height=16",
                                 "width=16", "num_inference_steps=4", "scheduler=ddim"});
    std::filesystem::remove_all(t / "out");
    return maxdiffusion(words);
  };
  auto latents = [&](const std::vector<std::string>& words) {
    const Outcome o = sample(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return read_file(t / "out/latents.safetensors");
  };
  const std::string plain = latents({}), none = latents({"guidance_scale=1"});
  EXPECT_EQ(latents({"guidance_interval=[0, 1]"}), plain);
  EXPECT_EQ(latents({"guidance_interval=[0.5, 0.5]"}), none);
  const std::string half = latents({"guidance_interval=[0.5, 1]"});
  EXPECT_NE(half, plain);
  EXPECT_NE(half, none);
  // The first quarter ends at the second of four steps.
  EXPECT_EQ(latents({"guidance_interval=[0.25, 1]"}), latents({"guidance_interval=[0.3, 1]"}));
  // APG with eta 1 and without norm limit and momentum equals classifier-free guidance, so each case changes one of
  // them.
  std::set<std::string> all = {plain, none};
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"guidance_method=apg", "apg_norm_threshold=0.01"},
        {"guidance_method=apg", "apg_norm_threshold=0", "apg_eta=0"},
        {"guidance_method=apg", "apg_norm_threshold=0", "apg_momentum=-0.5"},
        {"guidance_method=cfg_zero"},
        {"guidance_method=cfg_zero", "cfg_zero_init_steps=0"},
        {"guidance_method=cfg_zero", "guidance_rescale=0.5"}})
    EXPECT_TRUE(all.insert(latents(words)).second) << words.back();
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"guidance_interval=[0.5]"}, "guidance_interval is [0.5]; expected two numbers"},
           {{"guidance_interval=[0.8, 0.2]"}, "guidance_interval is [0.8, 0.2]; expected two numbers, from and to"},
           {{"guidance_interval=[0, 2]"}, "guidance_interval"},
           {{"guidance_method=agp"}, "guidance_method"},
           {{"apg_norm_threshold=-1"}, "apg_norm_threshold"}}) {
    const Outcome o = sample(words);
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
  EXPECT_TRUE(contains(sample({"apg_eta=0.5"}).err, "apg_eta is ignored: only guidance_method=apg reads it"));
}

/// Runs the program with a golden model and reads latents.safetensors.
class GuidedSamples {
 public:
  Outcome run(const std::string& model, std::vector<std::string> words) {
    words.insert(words.begin(), {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                 "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/" + model,
                                 "output_dir=" + (t_ / "out"), "output_type=latent", "prompt=heart", "height=32",
                                 "width=48", "num_inference_steps=4", "max_sequence_length=24"});
    std::filesystem::remove_all(t_ / "out");
    return maxdiffusion(words);
  }
  std::vector<double> latents(const std::string& model, const std::vector<std::string>& words) {
    const Outcome o = run(model, words);
    EXPECT_EQ(o.status, 0) << o.err;
    return SafetensorsReader::open(t_ / "out/latents.safetensors").tensors().at("latents").to_doubles();
  }

 private:
  TemporaryFolder t_;
};

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b.at(i)));
  return most;
}

TEST(Guidance, OfOtherModelsAndRefusals) {
  GuidedSamples s;
  // In all steps but the first, with real guidance and with embedded guidance.
  const std::vector<std::string> skip = {"skip_layer_guidance_scale=2", "skip_layer_guidance_layers=[1]",
                                         "skip_layer_guidance_start=0", "skip_layer_guidance_stop=1"};
  for (const auto& [model, guided] :
       std::vector<std::pair<std::string, std::string>>{{"zimage/base", "guidance_scale=2"},
                                                        {"flux/dev", "guidance_scale=2"},
                                                        {"qwenimage/base", "true_cfg_scale=2"}}) {
    SCOPED_TRACE(model);
    std::vector<std::string> words = skip;
    words.push_back(guided);
    EXPECT_GT(distance(s.latents(model, words), s.latents(model, {guided})), 1e-3);
  }
  // The usual range, 0.01 to 0.2, has none of 4 steps.
  const Outcome none = s.run("wan/t2v", {skip[0], skip[1]});
  EXPECT_EQ(none.status, 0) << none.err;
  EXPECT_TRUE(contains(none.err, "skip_layer_guidance_scale is ignored: skip-layer guidance applies to none of the 4"))
      << none.err;
  // Stacked blocks give the same prediction as separate ones.
  for (const std::vector<std::string>& words : {skip, {"pag_scale=2", "pag_applied_layers=[attn1]"}}) {
    std::vector<std::string> stacked = words;
    stacked.emplace_back("scan_layers=true");
    const std::vector<double> plain = s.latents("wan/t2v", words);
    EXPECT_LT(distance(plain, s.latents("wan/t2v", stacked)), 1e-4);
    EXPECT_GT(distance(plain, s.latents("wan/t2v", {})), 1e-3);
  }
  struct Refused {
    std::string model;
    std::vector<std::string> words;
    std::string message;
  };
  for (const Refused& r : std::vector<Refused>{
           {"pipelines/sd",
            {"guidance_method=cfg_pp", "scheduler=dpmpp_2m"},
            "guidance_method is cfg_pp; expected another"},
           {"pipelines/sd", {"guidance_method=cfg_pp", "cfg_pp_lambda=1.5"}, "cfg_pp_lambda"},
           {"pipelines/sd", {"pag_scale=3", "pag_applied_layers=[middle]"}, "pag_applied_layers has 'middle'"},
           {"pipelines/sd", {"pag_scale=3", "pag_applied_layers=['(']"}, "which is no regular expression"},
           {"pipelines/sd",
            {"skip_layer_guidance_scale=3", "skip_layer_guidance_layers=[0]"},
            "skip_layer_guidance_scale is 3; expected 0: this model is no sequence of blocks"},
           {"pipelines/sd", {"freeu=[1, 1]"}, "freeu is [1, 1]; expected four numbers"},
           {"flux/dev", {"freeu=[1, 1, 1, 1]"}, "freeu is [1, 1, 1, 1]; expected none: this model is no UNet"},
           {"flux/dev", {"pag_scale=3"}, "pag_scale is 3; expected 0: this model has no self attention"},
           {"wan/t2v",
            {"skip_layer_guidance_scale=3"},
            "skip_layer_guidance_layers is empty; expected numbers of blocks, 0 to 1"},
           {"wan/t2v",
            {"skip_layer_guidance_scale=3", "skip_layer_guidance_layers=[2]"},
            "skip_layer_guidance_layers has 2; expected 0 to 1: this model has 2 blocks"},
           {"wan/t2v",
            {"skip_layer_guidance_scale=3", "skip_layer_guidance_layers=[1]", "pag_scale=2",
             "pag_applied_layers=[attn1]"},
            "expected one of them at most"},
           {"wan/t2v",
            {"pag_scale=2", "pag_applied_layers=[blocks.0]", "scan_layers=true"},
            "the attention of 1 of 2 stacked blocks is perturbed"},
           {"wan/t2v",
            {"pag_scale=2", "pag_applied_layers=[attn1]", "use_cfg_cache=true"},
            "pag_scale is 2; expected 0 with"}}) {
    const Outcome o = s.run(r.model, r.words);
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, r.message)) << r.message << "\n" << o.err;
  }
}

}  // namespace
}  // namespace md
