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
  for (const Least& l :
       std::vector<Least>{{"flux/dev", first, always},
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
                                               l.model.ends_with("sdxl") ? "] Cached 2/4 steps" : "] Cached 3/4 steps");
    double off = 0, changed = 0, largest = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      off = std::max(off, std::abs(plain[i] - none.at(i)));
      largest = std::max(largest, std::abs(plain[i]));
      changed = std::max(changed, std::abs(plain[i] - reused.at(i)));
    }
    EXPECT_LE(off, 1e-5 * largest);
    EXPECT_GT(changed, 1e-3 * largest);
  }
}

TEST(StepCaches, OfTheFirstBlockAreTheSameWithStackedBlocks) {
  TemporaryFolder t;
  for (const std::string model : {"zimage/base", "qwenimage/base", "wan/t2v"}) {
    std::vector<std::vector<double>> both;
    for (const char* scan : {"scan_layers=false", "scan_layers=true"}) {
      std::vector<std::string> words = {"use_first_block_cache=true", "first_block_cache_threshold=1.2",
                                        "num_inference_steps=8", scan};
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
