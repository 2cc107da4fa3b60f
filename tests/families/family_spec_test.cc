// A family's functions must take and return what its FamilySpec says, for every pipeline class.
#include "maxdiffusion/families/family_spec.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/ops/elementwise.h"
#include "tests/families/toy_family.h"

namespace md {
namespace {

/// A tiny folder of tests/golden for class names with this prefix; the first match counts.
constexpr std::pair<const char*, const char*> kFolders[] = {{"StableDiffusionXL", "pipelines/sdxl"},
                                                            {"StableDiffusion", "pipelines/sd"},
                                                            {"LatentConsistency", "pipelines/sd"},
                                                            {"WanImageToVideo", "wan/i2v"},
                                                            {"Wan", "wan/t2v"},
                                                            {"Flux2", "flux2/base"},
                                                            {"Flux", "flux/dev"},
                                                            {"ZImage", "zimage/base"},
                                                            {"QwenImageEditPlus", "qwenimage_edit/plus"},
                                                            {"QwenImageEdit", "qwenimage_edit/edit"},
                                                            {"QwenImage", "qwenimage/base"}};

ModelFolder tiny_folder(const std::string& pipeline) {
  if (pipeline == "ToyPipeline") {
    TemporaryFolder t;
    write_toy_folder(t / "toy");
    return ModelFolder::open(t / "toy");
  }
  for (const auto& [beginning, folder] : kFolders) {
    if (!pipeline.starts_with(beginning)) continue;
    std::map<std::string, std::string> files =
        ModelFolder::open(std::string(MD_SOURCE_DIR "/tests/golden/") + folder).files();
    nlohmann::json index = parse_json(files.at("model_index.json"));
    index["_class_name"] = pipeline;
    files["model_index.json"] = index.dump();
    ModelFolder tiny = ModelFolder::from_texts(files);
    tiny.set_option("text_encoder_out_layers", std::vector<int64_t>{1, 2, 3});  // fewer than in published models
    return tiny;
  }
  throw Error(Code::invalid_config, pipeline + " has no tiny folder in this test");
}

/// Sizes, steps and guidance of diffusers' pipelines, or of the model's page where the pipeline serves several models.
TEST(FamilySpec, SampleDefaultsAreThoseOfThePublishedPipelines) {
  using Json = nlohmann::json;
  const auto expect = [](const std::string& folder, const Json& scheduler, int64_t height, int64_t width, int64_t steps,
                         double guidance) {
    std::map<std::string, std::string> files = ModelFolder::open(MD_SOURCE_DIR "/tests/golden/" + folder).files();
    Json config = parse_json(files.at("scheduler/scheduler_config.json"));
    config.update(scheduler);
    files["scheduler/scheduler_config.json"] = config.dump();
    Json index = parse_json(files.at("model_index.json"));
    index["scheduler"][1] = config["_class_name"];
    files["model_index.json"] = index.dump();
    ModelFolder tiny = ModelFolder::from_texts(files);
    tiny.set_option("text_encoder_out_layers", std::vector<int64_t>{1, 2, 3});
    const SampleDefaults d = make_family(tiny)->spec().sample_defaults;
    EXPECT_EQ(d.height, height) << folder;
    EXPECT_EQ(d.width, width) << folder;
    EXPECT_EQ(d.num_inference_steps, steps) << folder;
    EXPECT_EQ(d.guidance_scale, guidance) << folder;
  };
  const Json same = Json::object();
  const Json turbo = {{"_class_name", "EulerAncestralDiscreteScheduler"}, {"timestep_spacing", "trailing"}};
  expect("pipelines/sd", same, 16, 16, 50, 7.5);  // sample_size 8, twice as large in pixels
  expect("pipelines/sdxl", same, 16, 16, 50, 5);
  expect("pipelines/sdxl", turbo, 512, 512, 4, 0);
  expect("flux/dev", same, 1024, 1024, 28, 3.5);
  expect("flux/schnell", same, 1024, 1024, 4, 0);
  expect("wan/t2v", same, 480, 832, 50, 5);
  expect("zimage/base", same, 1024, 1024, 50, 5);
  expect("zimage/base", {{"shift", 3.0}}, 1024, 1024, 9, 0);
  expect("flux2/base", same, 1024, 1024, 50, 4);
  expect("flux2/distilled", same, 1024, 1024, 4, 4);
  expect("qwenimage/base", same, 1024, 1024, 50, 4);
  expect("qwenimage_edit/plus", same, 1024, 1024, 50, 4);
}

TEST(FamilySpec, OfEveryPipelineIsWhatItsFunctionsTakeAndReturn) {
  constexpr int64_t kBatch = 2;
  add_toy_family();
  for (const std::string& pipeline : family_pipelines()) {
    SCOPED_TRACE(pipeline);
    const std::shared_ptr<const Family> family = make_family(tiny_folder(pipeline));
    const FamilySpec& spec = family->spec();
    Graph g;
    ParamTable params;
    const Models models = [&](const std::string& component) { return Scope(g, params, component); };
    auto expect = [&](const std::vector<Field>& fields, const Conditioning& found) {
      for (const Field& f : fields) {
        ASSERT_TRUE(found.contains(f.name)) << f.name;
        EXPECT_EQ(to_string(found.at(f.name).shape()), to_string(batched(kBatch, f.shape))) << f.name;
      }
      EXPECT_EQ(found.size(), fields.size());
    };
    Conditioning text;
    for (const Field& f : spec.text_fields()) text[f.name] = g.input(f.name, batched(kBatch, f.shape));
    Conditioning conditioning = family->encode_text(models, text, 0);
    expect(spec.conditioning, conditioning);

    const int64_t side = std::max<int64_t>(spec.size_multiple(), 8);
    const MediaSize size{side, side, spec.autoencoder->frame_scale > 0 ? spec.autoencoder->frame_scale + 1 : 1};
    Conditioning extra = family->extra_conditioning(
        g, kBatch, {{{{side, side}}, {{0, 0}}, {{side, side}}}, constant(g, 3.5, DType::f32)});
    for (const auto& [name, x] : extra) EXPECT_EQ(x.dim(0), kBatch) << name;
    conditioning.merge(extra);  // rest: the spec's fields and embedded guidance
    for (const Field& f : spec.size_conditioning)
      EXPECT_EQ(to_string(conditioning.at(f.name).shape()), to_string(batched(kBatch, f.shape))) << f.name;
    if (const ImageConditioning* images = family->image_conditioning(); images && images->min_images > 0)
      for (const Field& f : images->fields(size)) conditioning[f.name] = g.input(f.name, batched(kBatch, f.shape));

    const Dims latent = family->latent_dims(size);
    EXPECT_EQ(latent, spec.autoencoder->latent_dims(size));
    EXPECT_EQ(spec.autoencoder->pixel_dims(spec.autoencoder->media_size(latent)), spec.autoencoder->pixel_dims(size));
    const Shape noisy = batched(kBatch, {DType::f32, latent});
    const Tensor predicted =
        family->predict(models, g.input("x", noisy), g.input("t", {DType::f32, {kBatch}}), conditioning, {});
    EXPECT_EQ(to_string(predicted.shape()), to_string(noisy));
    for (const Param& p : params.params())
      EXPECT_TRUE(p.model == spec.denoiser() || std::ranges::count(spec.text_components(), p.model) > 0) << p.input;
    const Tensor decoded = spec.autoencoder->decode(models, g.input("z", noisy), nullptr);
    EXPECT_EQ(to_string(decoded.shape()), to_string(batched(kBatch, {DType::f32, spec.autoencoder->pixel_dims(size)})));
  }
}

TEST(FamilySpec, LeavesFewQuestionsToVirtualFunctions) {
  const std::string header = read_file(MD_SOURCE_DIR "/maxdiffusion/families/family.h");
  const size_t begin = header.find("class Family {");
  const std::string declaration = header.substr(begin, header.find("\n};", begin) - begin);
  auto count = [&](const char* pattern) {
    const std::regex regex(pattern);
    return std::distance(std::sregex_iterator(declaration.begin(), declaration.end(), regex), std::sregex_iterator());
  };
  EXPECT_LE(count(R"(\bvirtual\b)"), 8);
  EXPECT_EQ(count(R"(\) const = 0;)"), 2);
}

}  // namespace
}  // namespace md
