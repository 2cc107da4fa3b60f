// Caches between steps of image models: what they refuse, and that they count for every model. Their results are those
// of diffusers' hooks (tests/golden/cached, pipelines_test.cc).
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/families/family.h"
#include "tests/cli/command.h"

namespace md {
namespace {

using namespace std::string_literals;

Outcome generate(const TemporaryFolder& t, const std::string& model, std::vector<std::string> words) {
  words.insert(words.begin(), {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                               "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/" + model,
                               "output_dir=" + (t / "out"), "output_type=latent", "prompt=heart", "height=32",
                               "width=32", "num_inference_steps=4", "max_sequence_length=24", "sample_seed=3"});
  std::filesystem::remove_all(t / "out");
  return maxdiffusion(words);
}

TEST(StepCaches, AreRefusedByNameWhereTheyCannotBe) {
  TemporaryFolder t;
  struct Refused {
    std::string model;
    std::vector<std::string> words;
    std::string message;
  };
  const std::string no_blocks = "is true; expected false: this model is no sequence of blocks";
  for (const Refused& r : std::vector<Refused>{
           {"pipelines/sd", {"use_first_block_cache=true"}, "use_first_block_cache " + no_blocks},
           {"pipelines/sdxl", {"use_magcache=true"}, "use_magcache " + no_blocks},
           {"flux/dev", {"use_deepcache=true"}, "use_deepcache is true; expected false: this model is no UNet"},
           {"pipelines/sd",
            {"use_deepcache=true", "deepcache_branch=3"},
            "deepcache_branch is 3; expected 0 to 2: this UNet has 4 skip connections"},
           {"pipelines/sd", {"use_deepcache=true", "deepcache_interval=0"}, "deepcache_interval"},
           {"pipelines/sd",
            {"use_deepcache=true", "controlnet_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/controlnet",
             "controlnet_image=" MD_SOURCE_DIR "/docs/images/quickstart.png"},
            "use_deepcache is true; expected false with a ControlNet"},
           {"pipelines/sd", {"use_deepcache=true", "pag_scale=2"}, "pag_scale is 2; expected 0 with use_deepcache"},
           {"flux/dev",
            {"use_first_block_cache=true", "first_block_cache_threshold=-1"},
            "first_block_cache_threshold"},
           {"flux/dev",
            {"use_first_block_cache=true", "scan_layers=true", "blocks_to_swap=1"},
            "blocks_to_swap is 1; expected 0 with use_first_block_cache"},
           {"flux/dev", {"use_first_block_cache=true", "use_deepcache=true"}, "several are true; expected one at most"},
           {"flux/dev",
            {"use_teacache=true"},
            "use_teacache is true; expected teacache_coefficients: none were fitted"},
           {"flux/dev", {"use_teacache=true", "teacache_thresh=-1"}, "teacache_thresh"},
           {"flux/dev",
            {"use_teacache=true", "teacache_coefficients=[1, 0]", "scan_layers=true", "blocks_to_swap=1"},
            "blocks_to_swap is 1; expected 0 with use_teacache"},
           {"pipelines/sdxl", {"use_teacache=true"}, "use_teacache " + no_blocks},
           {"flux/dev", {"use_magcache=true"}, "use_magcache is true; expected mag_ratios_base: no ratios were"}}) {
    const Outcome o = generate(t, r.model, r.words);
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, r.message)) << r.message << "\n" << o.err;
  }
  EXPECT_TRUE(contains(generate(t, "pipelines/sd", {"deepcache_interval=2"}).err,
                       "deepcache_interval is ignored: use_deepcache=false"));
}

TEST(StepCaches, ReuseNothingAtTheirLeastAndEqualThePlainSample) {
  TemporaryFolder t;
  auto latents = [&](const std::string& model, const std::vector<std::string>& words, const std::string& log) {
    const Outcome o = generate(t, model, words);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(contains(o.err, log)) << o.err;
    return SafetensorsReader::open(t / "out/latents.safetensors").tensors().at("latents").to_doubles();
  };
  struct Least {
    std::string model;
    std::vector<std::string> cache, most;
  };
  const std::vector<std::string> first = {"use_first_block_cache=true", "first_block_cache_threshold=0"},
                                 always = {"use_first_block_cache=true", "first_block_cache_threshold=1e9"};
  // The first and the last step are always computed; the polynomial of no change is above 0.
  const std::vector<std::string> changed = {"use_teacache=true", "teacache_thresh=0", "teacache_coefficients=[1, 0.1]"},
                                 same = {"use_teacache=true", "teacache_thresh=1e9", "teacache_coefficients=[1, 0]"};
  for (const Least& l :
       std::vector<Least>{{"flux/dev", changed, same},
                          {"flux2/base", changed, same},
                          {"zimage/base", changed, same},
                          {"qwenimage/base", changed, same},
                          {"wan/t2v", changed, same},
                          {"flux/dev", first, always},
                          {"flux2/base", first, always},
                          {"zimage/base", first, always},
                          {"qwenimage/base", first, always},
                          {"wan/t2v", first, always},
                          {"pipelines/sd",
                           {"use_deepcache=true", "deepcache_interval=1"},
                           {"use_deepcache=true", "deepcache_interval=9"}},
                          // Steps without guidance begin again.
                          {"pipelines/sdxl",
                           {"use_deepcache=true", "deepcache_interval=1", "guidance_interval=[0.5, 1]"},
                           {"use_deepcache=true", "guidance_interval=[0.5, 1]"}}}) {
    SCOPED_TRACE(l.model);
    std::vector<std::string> extra, cache = l.cache, most = l.most;
    if (l.model.starts_with("flux2")) extra = {"text_encoder_out_layers=[1, 2, 3]"};
    if (l.model.ends_with("sdxl")) extra = {"guidance_interval=[0.5, 1]"};
    if (l.model.ends_with("sd")) extra = {"scheduler=ddim"};
    if (l.model.starts_with("wan")) extra = {"num_frames=5", "use_kv_cache=true"};
    if (!l.model.ends_with("sdxl"))
      for (auto* words : {&cache, &most}) words->insert(words->end(), extra.begin(), extra.end());
    const std::vector<double> plain = latents(l.model, extra, ""), none = latents(l.model, cache, "] Cached 0/4 steps"),
                              reused = latents(l.model, most,
                                               l.model.ends_with("sdxl") || l.cache[0] == "use_teacache=true"
                                                   ? "] Cached 2/4 steps"
                                                   : "] Cached 3/4 steps");
    double off = 0, moved = 0, largest = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      off = std::max(off, std::abs(plain[i] - none.at(i)));
      largest = std::max(largest, std::abs(plain[i]));
      moved = std::max(moved, std::abs(plain[i] - reused.at(i)));
    }
    EXPECT_LE(off, 1e-5 * largest);
    EXPECT_GT(moved, 1e-3 * largest);
  }
}

TEST(StepCaches, OfTheFirstBlockAreTheSameWithStackedBlocks) {
  TemporaryFolder t;
  const std::vector<std::string> first = {"use_first_block_cache=true", "first_block_cache_threshold=1.2"},
                                 tea = {"use_teacache=true", "teacache_thresh=1.2", "teacache_coefficients=[1, 0]"};
  for (const auto& [model, cache] :
       {std::pair{"zimage/base"s, first}, {"qwenimage/base"s, first}, {"wan/t2v"s, first}, {"qwenimage/base"s, tea}}) {
    std::vector<std::vector<double>> both;
    for (const char* scan : {"scan_layers=false", "scan_layers=true"}) {
      std::vector<std::string> words = cache;
      words.insert(words.end(), {"num_inference_steps=8", scan});
      if (model.starts_with("wan")) words.push_back("num_frames=5");
      const Outcome o = generate(t, model, words);
      ASSERT_EQ(o.status, 0) << o.err;
      EXPECT_TRUE(contains(o.err, "] Cached ") && !contains(o.err, "] Cached 0/8 steps")) << o.err;
      EXPECT_EQ(contains(o.err, "the blocks are not stacked"), both.size() == 1) << o.err;
      both.push_back(SafetensorsReader::open(t / "out/latents.safetensors").tensors().at("latents").to_doubles());
    }
    EXPECT_EQ(both[0], both[1]) << model;
  }
}

TEST(StepCaches, OfTheFirstBlocksInputReadWeightsInFewBits) {
  TemporaryFolder t;
  std::vector<std::vector<double>> both;
  for (const char* cache : {"use_teacache=false", "use_teacache=true"}) {
    const Outcome o = generate(
        t, "qwenimage/base", {"base_weights_dtype=int8", cache, "teacache_thresh=0", "teacache_coefficients=[1, 0.1]"});
    ASSERT_EQ(o.status, 0) << o.err;
    both.push_back(SafetensorsReader::open(t / "out/latents.safetensors").tensors().at("latents").to_doubles());
  }
  for (size_t i = 0; i < both[0].size(); ++i) EXPECT_NEAR(both[1].at(i), both[0][i], 1e-4) << i;
}

TEST(StepCaches, TeaCacheKnowsTheCoefficientsOfPublishedModels) {
  const auto of = [](const char* model, const nlohmann::json& sizes, const MediaSize& size) {
    ModelFolder folder = ModelFolder::open(std::string(MD_SOURCE_DIR "/tests/golden/") + model);
    const auto family = make_family(folder);
    EXPECT_TRUE(family->spec().teacache_coefficients(size, false).empty()) << model;  // a small model
    nlohmann::json config = parse_json(folder.files().at("transformer/config.json"));
    config.update(sizes);
    folder.set_config("transformer", config.dump());
    return make_family(folder)->spec().teacache_coefficients(size, false);
  };
  const nlohmann::json flux = {{"num_layers", 19},
                               {"num_single_layers", 38},
                               {"num_attention_heads", 24},
                               {"attention_head_dim", 128},
                               {"axes_dims_rope", {16, 56, 56}}},
                       wan14b = {{"num_layers", 40}, {"num_attention_heads", 40}, {"attention_head_dim", 128}},
                       wan1_3b = {{"num_layers", 30}, {"num_attention_heads", 12}, {"attention_head_dim", 128}};
  EXPECT_EQ(of("flux/dev", flux, {1024, 1024}),
            (std::vector<double>{498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861}));
  EXPECT_EQ(of("wan/t2v", wan1_3b, {480, 832})[1], 9230.41404);
  EXPECT_EQ(of("wan/t2v", wan14b, {480, 832})[1], 49053.7029);
  nlohmann::json of_images = wan14b;
  of_images["added_kv_proj_dim"] = 5120;
  EXPECT_EQ(of("wan/i2v", of_images, {480, 832})[1], -35422.9917);
  EXPECT_EQ(of("wan/i2v", of_images, {720, 1280})[1], 2133.93892);
}

TEST(StepCaches, MagCacheKnowsTheRatiosOfFlux1) {
  ModelFolder folder = ModelFolder::open(MD_SOURCE_DIR "/tests/golden/flux/dev");
  EXPECT_TRUE(make_family(folder)->spec().magcache_ratios({32, 32}, false).empty());  // a small model
  nlohmann::json config = parse_json(folder.files().at("transformer/config.json"));
  config.update(
      {{"num_layers", 19}, {"num_single_layers", 38}, {"num_attention_heads", 24}, {"attention_head_dim", 128}});
  config["axes_dims_rope"] = {16, 56, 56};
  folder.set_config("transformer", config.dump());
  const std::vector<double> ratios = make_family(folder)->spec().magcache_ratios({1024, 1024}, false);
  ASSERT_EQ(ratios.size(), 2 * 28U);
  EXPECT_EQ(ratios[2], 1.21094);
  EXPECT_EQ(ratios[3], 1.21094);
  EXPECT_EQ(ratios.back(), 0.89062);
}

}  // namespace
}  // namespace md
