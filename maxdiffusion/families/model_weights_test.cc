#include "maxdiffusion/families/model_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"

namespace md {
namespace {

constexpr const char* kIndex = R"({"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"],
                                   "scheduler": ["diffusers", "UniPCMultistepScheduler"]})";
constexpr const char* kConfig = R"({"num_attention_heads": 1, "attention_head_dim": 6, "in_channels": 2, "text_dim": 3,
  "out_channels": 2, "freq_dim": 4, "ffn_dim": 5, "num_layers": 2, "image_dim": 4, "added_kv_proj_dim": 6})";

/// A family with the functions that loading weights needs.
class OneDenoiser final : public Family {
 public:
  OneDenoiser() : Family({.denoisers = {"transformer"}}) {}
  Conditioning encode_text(const Models&, const Conditioning&, int64_t) const override { return {}; }
  Tensor predict(const Models&, Tensor x, Tensor, const Conditioning&, const PredictOptions&) const override {
    return x;
  }
};

class OriginalNames : public testing::Test {
 protected:
  OriginalNames() {
    make_folders(t / "transformer");
    make_folders(t / "scheduler");
    write_file_atomic(t / "model_index.json", kIndex);
    write_file_atomic(t / "transformer/config.json", kConfig);
    write_file_atomic(t / "scheduler/scheduler_config.json", "{}");
    const ParamTable params = table(false);
    for (const Param& p : params.params()) values_[p.path] = initial_value(p, 5);
  }
  ModelFolder folder() const { return ModelFolder::open(t.path()); }
  ParamTable table(bool stacked) const {
    Graph g;
    ParamTable params;
    const ModelFolder opened = folder();
    const Component& c = opened.components().at("transformer");
    find_model_class(c.class_name)->trace(Scope(g, params, "transformer", {.scan_layers = stacked}), c.config);
    return params;
  }
  ModelWeights weights(const std::string& replacement = "") const {
    return ModelWeights::for_sampling(folder(), OneDenoiser(), {.unet_checkpoint = replacement}, 0);
  }
  /// The values under the names of the original program, with `prefix`.
  HostArrays renamed(const std::string& prefix) const {
    const ModelFolder opened = folder();
    const Component& c = opened.components().at("transformer");
    const WeightNameMap others = find_model_class(c.class_name)->weight_names(c.config);
    HostArrays out;
    for (const auto& [name, value] : values_) out[prefix + others.aliases(name).front().name] = value;
    return out;
  }
  void expect_values(const ModelWeights& w) const {
    for (bool stacked : {false, true}) {
      const ParamTable params = table(stacked);
      for (const auto& [name, array] : w.read(params, "transformer"))
        for (const auto& [path, layer] : unstacked(params.find(name)->path, array))
          EXPECT_EQ(layer.to_doubles(), values_.at(path).to_doubles()) << path;
    }
  }

  TemporaryFolder t;
  HostArrays values_;
};

TEST_F(OriginalNames, AreReadFromAFileInPlaceOfTheFolder) {
  for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model."}) {
    HostArrays file = renamed(prefix);
    ASSERT_TRUE(file.contains(std::string(prefix) + "blocks.1.cross_attn.k_img.weight"));
    file[std::string(prefix) + "blocks.0.attn2.norm_added_q.weight"] = values_.begin()->second;  // no model reads it
    write_safetensors(t / "wan_fp32.safetensors", file);
    const ModelWeights w = weights(t / "wan_fp32.safetensors");
    expect_values(w);
    EXPECT_TRUE(w.linkable(table(false), "transformer").empty());
  }
}

TEST_F(OriginalNames, AreReadFromAFolderAndNotLinkedAsIfTheyWereDiffusers) {
  write_safetensors(t / "transformer/diffusion_pytorch_model.safetensors", renamed(""));
  expect_values(weights());
  EXPECT_TRUE(weights().linkable(table(false), "transformer").empty());
  write_safetensors(t / "transformer/diffusion_pytorch_model.safetensors", values_);
  expect_values(weights());
  for (bool stacked : {false, true})
    EXPECT_EQ(weights().linkable(table(stacked), "transformer"),
              std::vector{t / "transformer/diffusion_pytorch_model.safetensors"});
}

TEST_F(OriginalNames, WhoseHeadersWereCheckedAreNotOpenedAgainToBeReadOnce) {
  const std::string file = t / "transformer/diffusion_pytorch_model.safetensors";
  write_safetensors(file, renamed(""));
  const ModelWeights w = weights();
  std::filesystem::remove(file);
  const ParamTable params = table(false);
  EXPECT_EQ(w.read(params, "transformer").size(), values_.size());
  EXPECT_THROW(w.read(params, "transformer"), Error) << "it is held for longer than one load";
}

TEST_F(OriginalNames, OfAnotherModelAreReportedByDiffusersNames) {
  HostArrays file = renamed("");
  file.erase("blocks.1.self_attn.q.weight");
  write_safetensors(t / "wan.safetensors", file);
  try {
    weights(t / "wan.safetensors").open(table(false), "transformer");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("missing: blocks.1.attn1.to_q.weight"), std::string::npos) << e.what();
  }
}

TEST_F(OriginalNames, InAPickledFileAreRefusedWithTheWayOut) {
  write_file_atomic(t / "Wan2.1_T2V.pth", "PK");
  try {
    weights(t / "Wan2.1_T2V.pth").open(table(false), "transformer");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(std::string(e.what()).find("safetensors.torch.save_file(torch.load("), std::string::npos) << e.what();
  }
}

/// A tiny autoencoder of either version, under diffusers' names and under the original program's.
// P-17
TEST(WanAutoencoder, IsReadTheSameToTheBitUnderItsOriginalNames) {
  for (const std::string version : {"21", "22"}) {
    const std::string golden = MD_SOURCE_DIR "/tests/golden/wan_vae_" + version;
    const ModelClass* known = find_model_class("AutoencoderKLWan");
    const std::any config = known->read(parse_json(read_file(golden + "/config.json")));
    const WeightNameMap names = known->weight_names(config);
    Graph g;
    ParamTable params;
    known->trace(Scope(g, params, "vae"), config);
    const SafetensorsReader file = SafetensorsReader::open(golden + "/weights.safetensors");
    const HostArrays expected = open_component(params, "vae", file, golden)();
    for (const std::string prefix : {"", "first_stage_model."}) {
      TemporaryFolder t;
      HostArrays original;
      for (const auto& [name, value] : file.tensors()) original[prefix + names.aliases(name).front().name] = value;
      EXPECT_TRUE(original.contains(prefix + "decoder.middle.0.residual.0.gamma"));
      EXPECT_TRUE(original.contains(prefix + "conv1.weight"));
      EXPECT_TRUE(original.contains(prefix + (version == "21" ? "decoder.upsamples.1.residual.0.gamma"
                                                              : "decoder.upsamples.1.upsamples.0.residual.0.gamma")));
      write_safetensors(t / "vae.safetensors", original);
      const HostArrays found = open_component(params, "vae", SafetensorsReader::open(t / "vae.safetensors"),
                                              t / "vae.safetensors", {.weight_names = names})();
      ASSERT_EQ(found.size(), expected.size());
      for (const auto& [name, value] : expected)
        EXPECT_TRUE(std::equal(value.data(), value.data() + value.bytes(), found.at(name).data())) << name;
    }
  }
}

}  // namespace
}  // namespace md
