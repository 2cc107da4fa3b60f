// Files of Flux's original program: every tensor has its place, and weights come as the folder of the same model has
// them, of whatever type the file is. tools/golden/flux_files.py writes the files and holds them against diffusers.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/models/flux_names.h"
#include "maxdiffusion/models/original_names.h"
#include "maxdiffusion/models/registry.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

struct Traced {
  Graph graph;
  ParamTable params;
  OtherNames names;
  std::vector<WantedWeight> wanted;
};
/// A model by the config.json at `config`, below tests/golden.
std::unique_ptr<Traced> traced(const std::string& class_name, const std::string& config, DType weights = DType::f32) {
  auto t = std::make_unique<Traced>();
  const ModelClass& c = *find_model_class(class_name);
  const std::any read = c.read(parse_json(read_file(golden_path(config))));
  c.trace(Scope(t->graph, t->params, "model", {.weights = weights}), read);
  t->names = c.other_names(read);
  for (const Param& p : t->params.params()) t->wanted.push_back({p.path, p.shape});
  return t;
}
std::unique_ptr<Traced> tiny(DType weights = DType::f32) {
  return traced("FluxTransformer2DModel", "flux/dev/transformer/config.json", weights);
}

HostArrays load(const Traced& t, const std::string& path) {
  return load_weights(path, t.wanted, {.other_names = t.names});
}

void expect_same(const HostArrays& got, const HostArrays& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, array] : want) {
    EXPECT_EQ(got.at(name).dims(), array.dims()) << name;
    EXPECT_EQ(got.at(name).to_doubles(), array.to_doubles()) << name;
  }
}

HostArrays original_flux() { return SafetensorsReader::open(golden_path("flux/original/flux1.safetensors")).tensors(); }

TEST(FluxNames, GiveEveryPartOfEveryPublishedTensorOnce) {
  for (const auto& [model, tensors] : {std::pair{"flux_dev", 780U}, {"flux_schnell", 776U}}) {
    const auto t = traced("FluxTransformer2DModel", fmt::format("full/{}.json", model));
    std::map<std::string, std::multiset<int64_t>> parts;
    std::map<std::string, int64_t> counts;
    for (const WantedWeight& w : t->wanted) {
      const std::vector<OtherName> names = t->names.of(w.name);
      ASSERT_GE(names.size(), 3U) << w.name;
      EXPECT_EQ(names[1].whole(), "model.diffusion_model." + names[0].whole());
      parts[names[0].name].insert(names[0].part.begin(), names[0].part.end());
      counts[names[0].name] = names[0].parts;
    }
    EXPECT_EQ(parts.size(), tensors);
    for (const auto& [name, found] : parts) {
      std::multiset<int64_t> all;
      for (int64_t i = 0; i < counts[name]; ++i) all.insert(i);
      EXPECT_EQ(found, all) << name;
    }
  }
  const OtherNames names = original_flux_names({});
  EXPECT_TRUE(names.of("transformer_blocks.0.attn").empty());
  EXPECT_TRUE(names.of("proj_output.weight").empty());
}

TEST(FluxFiles, OfTheOriginalProgramHoldTheWeightsOfTheFolder) {
  const auto t = tiny();
  const HostArrays want = load(*t, golden_path("flux/dev/transformer"));
  expect_same(load(*t, golden_path("flux/original/flux1.safetensors")), want);

  const TemporaryFolder folder;
  HostArrays whole;
  for (const auto& [name, array] : original_flux()) whole["model.diffusion_model." + name] = array;
  whole["text_encoders.clip_l.logit_scale"] = want.at("proj_out.bias");  // of another model, which nobody asked for
  write_safetensors(folder / "whole.safetensors", whole);
  expect_same(load(*t, folder / "whole.safetensors"), want);
}

TEST(FluxFiles, OfTheAutoencoderHoldTheWeightsOfTheFolder) {
  const auto t = traced("AutoencoderKL", "flux/dev/vae/config.json");
  expect_same(load(*t, golden_path("flux/original/ae.safetensors")), load(*t, golden_path("flux/dev/vae")));
}

TEST(FluxFiles, MayBeOfSixteenOrOfEightBits) {
  const TemporaryFolder folder;
  for (DType type : {DType::f16, DType::f8e4m3fn}) {
    HostArrays narrow;
    for (const auto& [name, array] : original_flux()) narrow[name] = array.cast(type);
    write_safetensors(folder / "flux1.safetensors", narrow);
    for (DType weights : {DType::f32, DType::bf16}) {
      const auto t = tiny(weights);
      HostArrays want = load(*t, golden_path("flux/dev/transformer"));
      for (auto& [name, array] : want) array = array.cast(type).cast(weights);
      expect_same(load(*t, folder / "flux1.safetensors"), want);
    }
  }
}

TEST(FluxFiles, WithScalesAreRefusedByName) {
  const TemporaryFolder folder;
  for (const char* scale : {"scale_weight", "weight_scale"}) {
    HostArrays scaled = original_flux();
    const std::string module = "double_blocks.0.img_attn.qkv.";
    scaled[module + "weight"] = scaled.at(module + "weight").cast(DType::f8e4m3fn);
    const float half = 0.5;
    scaled[module + scale] = HostArray::of<float>({DType::f32, {}}, {&half, 1});
    write_safetensors(folder / "flux1.safetensors", scaled);
    try {
      load(*tiny(), folder / "flux1.safetensors");
      ADD_FAILURE() << "was read";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_NE(std::string(e.what()).find(module + scale), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace md
