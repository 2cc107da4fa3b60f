// Files of Flux's original program: every tensor is mapped, and weights equal those of the same model's folder,
// whatever the file's type. tools/golden/flux_files.py writes the files and compares them with diffusers.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/models/flux_weight_names.h"
#include "maxdiffusion/models/original_weight_names.h"
#include "maxdiffusion/models/registry.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

struct Traced {
  Graph graph;
  ParamTable params;
  WeightNameMap names;
  std::vector<WantedWeight> expected;
};
/// Traces the model of the config.json at `config`, relative to tests/golden.
std::unique_ptr<Traced> traced(const std::string& class_name, const std::string& config, DType weights = DType::f32) {
  auto t = std::make_unique<Traced>();
  const ModelClass& c = *find_model_class(class_name);
  const std::any read = c.read(parse_json(read_file(golden_path(config))));
  c.trace(Scope(t->graph, t->params, "model", {.weights = weights}), read);
  t->names = c.weight_names(read);
  for (const Param& p : t->params.params()) t->expected.push_back({p.path, p.shape});
  return t;
}
std::unique_ptr<Traced> tiny(DType weights = DType::f32) {
  return traced("FluxTransformer2DModel", "flux/dev/transformer/config.json", weights);
}

HostArrays load(const Traced& t, const std::string& path) {
  return load_weights(path, t.expected, {.weight_names = t.names});
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
    for (const WantedWeight& w : t->expected) {
      const std::vector<WeightAlias> names = t->names.aliases(w.name);
      ASSERT_GE(names.size(), 3U) << w.name;
      EXPECT_EQ(names[1].full_name(), "model.diffusion_model." + names[0].full_name());
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
  const WeightNameMap names = original_flux_names({});
  EXPECT_TRUE(names.aliases("transformer_blocks.0.attn").empty());
  EXPECT_TRUE(names.aliases("proj_output.weight").empty());
}

TEST(FluxFiles, OfTheOriginalProgramHoldTheWeightsOfTheFolder) {
  const auto t = tiny();
  const HostArrays want = load(*t, golden_path("flux/dev/transformer"));
  expect_same(load(*t, golden_path("flux/original/flux1.safetensors")), want);

  const TemporaryFolder folder;
  HostArrays whole;
  for (const auto& [name, array] : original_flux()) whole["model.diffusion_model." + name] = array;
  whole["text_encoders.clip_l.logit_scale"] = want.at("proj_out.bias");  // belongs to another model and is ignored
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

/// Reads the tiny model's weights from a file in which one fused tensor is f8 with a scale tensor.
HostArrays read_scaled(const std::string& folder, const std::string& scale, const std::vector<float>& values,
                       Dims dims) {
  HostArrays file = original_flux();
  const std::string module = "double_blocks.0.img_attn.qkv.";
  file[module + "weight"] = file.at(module + "weight").cast(DType::f8e4m3fn);
  file[module + scale] = HostArray::of<float>({DType::f32, std::move(dims)}, values);
  file[module + "scale_input"] = file["scaled_fp8"] = HostArray::of<float>({DType::f32, {}}, {values.data(), 1});
  write_safetensors(folder + "/flux1.safetensors", file);
  return load(*tiny(), folder + "/flux1.safetensors");
}

TEST(FluxFiles, OfEightBitsWithScalesAreReadTimesThem) {
  const TemporaryFolder folder;
  const HostArray fused =
      original_flux().at("double_blocks.0.img_attn.qkv.weight").cast(DType::f8e4m3fn).cast(DType::f32);
  const int64_t rows = fused.dims()[0], columns = fused.dims()[1];
  std::vector<float> each(static_cast<size_t>(rows));
  for (size_t i = 0; i < each.size(); ++i) each[i] = 0.25F + static_cast<float>(i);
  for (const auto& [scale, values, dims] :
       {std::tuple{"scale_weight", std::vector{0.5F}, Dims{}}, std::tuple{"weight_scale", each, Dims{rows}},
        std::tuple{"weight_scale", each, Dims{rows, 1}}}) {
    const HostArrays got = read_scaled(folder.path(), scale, values, dims);
    const auto value = fused.view<float>();
    int64_t row = 0;
    for (const char* part : {"to_q", "to_k", "to_v"}) {
      const HostArray& w = got.at(fmt::format("transformer_blocks.0.attn.{}.weight", part));
      ASSERT_EQ(w.shape().elements(), rows / 3 * columns);
      for (int64_t i = 0; i < rows / 3 * columns; ++i) {
        const auto at = static_cast<size_t>(row * columns + i);
        ASSERT_EQ(w.view<float>()[static_cast<size_t>(i)],
                  value[at] * values[values.size() == 1 ? 0 : at / static_cast<size_t>(columns)])
            << scale << " " << part << " " << i;
      }
      row += rows / 3;
    }
  }
}

TEST(FluxFiles, ScalesThatDoNotFitAreNamed) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& scale, const std::vector<float>& values, const Dims& dims) {
    try {
      read_scaled(folder.path(), scale, values, dims);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  const std::string message = refusal("weight_scale", {1, 2}, {2});
  EXPECT_NE(message.find("'double_blocks.0.img_attn.qkv.weight' is"), message.npos) << message;
  EXPECT_NE(message.find("f32[2]; expected one number, or one for each of"), message.npos) << message;
  EXPECT_NE(refusal("weight_scale_2", {1}, {}).find("nvfp4"), std::string::npos);
}

}  // namespace
}  // namespace md
