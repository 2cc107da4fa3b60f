// Image-to-image sampling through the program. pipelines_test.cc compares its results with diffusers.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/pipelines/sample_request.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/";
using Words = std::vector<std::string>;

class ImageToImage : public testing::Test {
 protected:
  ImageToImage() {
    const SafetensorsReader file = SafetensorsReader::open(kGoldens + "image_to_image/golden.safetensors");
    for (const char* name : {"photo", "other", "mask"})
      write_png(t / (std::string(name) + ".png"), file.tensors().at(name));
  }
  Outcome generate(const std::string& folder, Words words) {
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + folder,
                  "output_dir=" + (t / "out"), "num_inference_steps=4", "max_sequence_length=12"});
    if (std::ranges::none_of(words, [](const auto& w) { return w.starts_with("prompt="); }))
      words.emplace_back("prompt=a red heart");
    return maxdiffusion(words);
  }
  std::vector<double> latents(const Words& words) {
    Words all = {"output_type=latent", "image=" + (t / "photo.png"), "height=16", "width=16"};
    all.insert(all.end(), words.begin(), words.end());
    std::filesystem::remove_all(t / "out");
    const Outcome o = generate(sd, all);
    EXPECT_EQ(o.status, 0) << o.err;
    return SafetensorsReader::open(t / "out/latents.safetensors").tensors().at("latents").to_doubles();
  }

  /// The pixels of the single image generated with these words.
  HostArray pixels(const std::string& folder, Words words) {
    std::filesystem::remove_all(t / "out");
    const Outcome o = generate(folder, std::move(words));
    EXPECT_EQ(o.status, 0) << o.err;
    return decode_image(t / "out/image_0.png");
  }
  /// Writes a mask that is white in columns [from, to) and black elsewhere.
  std::string mask(int64_t height, int64_t width, int64_t from, int64_t to) {
    HostArray rgb(Shape{DType::u8, {height, width, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t i = 0; i < v.size(); ++i) {
      const int64_t x = static_cast<int64_t>(i / 3) % width;
      v[i] = x >= from && x < to ? 255 : 0;
    }
    write_png(t / "columns.png", rgb);
    return "mask_image=" + (t / "columns.png");
  }

  const std::string sd = kGoldens + "pipelines/sd", inpainting = kGoldens + "image_to_image/inpainting";
  TemporaryFolder t;
};

TEST_F(ImageToImage, RefusesWhatCannotBegin) {
  write_file_atomic(t / "text.png", "no image");
  const std::string photo = "image=" + (t / "photo.png"), wan = kGoldens + "wan/t2v";
  struct Refused {
    std::string folder;
    Words words;
    int status;
    std::string message;
  };
  for (const Refused& r : std::vector<Refused>{
           {sd, {photo, "strength=1.5"}, 2, "strength is `1.5`, expected a number, 0 to 1"},
           {sd, {photo, "strength=-0.1"}, 2, "strength is `-0.1`, expected a number, 0 to 1"},
           {sd, {photo, "strength=0.2"}, 2, "strength is 0.2, and so none of num_inference_steps=4 steps runs"},
           {sd, {photo, "strength=0.2"}, 2, "try: strength=0.25, or num_inference_steps=5"},
           {sd, {photo, "strength=0.8", "num_inference_steps=1"}, 2, "try: strength=1, or num_inference_steps=2"},
           {sd, {photo, "strength=0"}, 2, "try: strength=0.25"},
           {sd,
            {photo + "," + (t / "other.png"), "prompt=[\"a\", \"b\", \"c\"]"},
            2,
            "image: 2 images are given for 3"},
           {sd, {"image=/nowhere.png"}, 4, "/nowhere.png"},
           {sd, {"image=" + (t / "text.png")}, 4, t / "text.png"},
           {wan, {photo, "height=32", "width=32", "num_frames=5"}, 2, "image: an image is given; expected a video"}}) {
    const Outcome o = generate(r.folder, r.words);
    EXPECT_EQ(o.status, r.status) << r.words.back() << "\n" << o.err;
    EXPECT_TRUE(contains(o.err, r.message)) << r.message << "\n" << o.err;
  }
  const Outcome o = generate(
      sd, {photo, "diffusion_scheduler_config={_class_name: PNDMScheduler, skip_prk_steps: false}", "strength=0.5"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "PNDMScheduler expects skip_prk_steps=true")) << o.err;
}

TEST_F(ImageToImage, FilesOfOtherControlsAreRefusedByTheirKind) {
  const HostArray some(Shape{DType::f32, {4, 3, 3, 3}});
  const std::string file = t / "control.safetensors";
  for (const auto& [tensor, kind] : {std::pair{"lora_controlnet", "Control-LoRA"},
                                     {"lllite_unet_input_blocks_4_1.depth.weight", "ControlNet-LLLite"}}) {
    write_safetensors(file, {{tensor, some}, {"input_hint_block.0.weight", some}});
    const Outcome o = maxdiffusion({"generate_controlnet", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                    "pretrained_model_name_or_path=" + sd, "prompt=x",
                                    "controlnet_model_name_or_path=" + file, "controlnet_image=" + (t / "photo.png")});
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(
        contains(o.err, fmt::format("'{}' is a {} (it has the tensor {}), which is not supported", file, kind, tensor)))
        << o.err;
    EXPECT_FALSE(contains(o.err, "config")) << o.err;
  }
}

/// diffusers' defaults, and those of the keys that a request with an image, a mask and a ControlNet leaves out.
TEST_F(ImageToImage, DefaultsAreThoseOfDiffusersPipelines) {
  const auto golden = parse_json(read_file(kGoldens + "pipeline_defaults.json"))["pipelines"];
  for (const auto& [folder, prefix] : {std::pair{sd, std::string("StableDiffusion")},
                                       {kGoldens + "pipelines/sdxl", std::string("StableDiffusionXL")}}) {
    const ModelFolder opened = ModelFolder::open(folder);
    const std::shared_ptr<const Family> family = make_family(opened);
    for (const auto& [name, begins, masked, controlled] :
         std::vector<std::tuple<std::string, bool, bool, bool>>{{"Img2Img", true, false, false},
                                                                {"Inpaint", true, true, false},
                                                                {"ControlNet", false, false, true},
                                                                {"ControlNetImg2Img", true, false, true},
                                                                {"ControlNetInpaint", true, true, true}}) {
      const auto& its = golden[prefix + name + "Pipeline"];
      SampleRequest r;
      r.prompt = {"x"}, r.height = 64, r.width = 64;
      const HostArray image(Shape{DType::u8, {64, 64, 3}});
      if (begins) r.images = {image};
      if (masked) r.mask = image;
      if (controlled) r.controls = {{.image = image}};
      const SampleOptions o = sample_options(r, *family, opened.scheduler_config(), {}, 1);
      if (begins) {
        EXPECT_EQ(o.strength, its["strength"].get<double>()) << prefix << name;
      }
      if (!controlled) continue;
      EXPECT_EQ(o.controls.at(0).scale, its["controlnet_conditioning_scale"].get<double>()) << prefix << name;
      EXPECT_EQ(o.controls.at(0).start, its["control_guidance_start"].get<double>()) << prefix << name;
      EXPECT_EQ(o.controls.at(0).end, its["control_guidance_end"].get<double>()) << prefix << name;
    }
  }
}

TEST_F(ImageToImage, SaysThatStrengthIsIgnoredWithoutAnImage) {
  const Outcome o = generate(sd, {"strength=0.5", "height=16", "width=16"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "strength is ignored: samples start from pure noise")) << o.err;
}

TEST_F(ImageToImage, OfAModelWithReferencesNeedsAStrength) {
  write_png(t / "large.png", resize_rgb8(decode_image(t / "photo.png"), 64, 80, Filter::lanczos));
  for (const bool begins : {false, true}) {
    Words words = {"image=" + (t / "large.png"), "height=32", "width=32", "text_encoder_out_layers=[1, 2, 3]"};
    if (begins) words.emplace_back("strength=0.5");
    std::filesystem::remove_all(t / "out");
    const Outcome o = generate(kGoldens + "flux2/base", words);
    ASSERT_EQ(o.status, 0) << o.err;
    for (const auto& file : std::filesystem::directory_iterator(t / "out")) {
      EXPECT_EQ(contains(read_file(file.path().string()), ", Denoising strength: 0.5, "), begins) << file.path();
    }
    EXPECT_FALSE(std::filesystem::is_empty(t / "out"));
  }
}

TEST_F(ImageToImage, IsOfOneSampleWhateverElseIsGenerated) {
  const Words two = {"prompt=[\"a red heart\", \"a red heart\"]", "scheduler=euler_ancestral", "strength=0.75"};
  const std::vector<double> both = latents(two), one = latents({"scheduler=euler_ancestral", "strength=0.75"});
  ASSERT_EQ(both.size(), 2 * one.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(both[i], one[i], 1e-4) << i;
  EXPECT_GT(std::abs(both[0] - both[one.size()]), 1e-3);  // the second has another index
  Words in_groups = two;
  in_groups.emplace_back("per_device_batch_size=1");
  const std::vector<double> grouped = latents(in_groups);
  for (size_t i = 0; i < both.size(); ++i) EXPECT_NEAR(both[i], grouped[i], 1e-4) << i;
}

TEST_F(ImageToImage, IsGeneratedAgainFromItsFileToTheBit) {
  ASSERT_EQ(generate(sd, {"image=" + (t / "photo.png"), "strength=0.5", "scheduler=euler", "sample_seed=3"}).status, 0);
  const std::string made = read_file(t / "out/image_0.png");
  EXPECT_TRUE(contains(made, "Size: 50x36, ")) << made.substr(0, 600);  // the image's, rounded to whole latent cells
  EXPECT_TRUE(contains(made, ", Denoising strength: 0.5, "));
  EXPECT_TRUE(contains(made, "\nimage: ") && contains(made, t / "photo.png"));
  const Outcome o = maxdiffusion({"generate", t / "out/image_0.png", "xla_flags=--xla_backend_optimization_level=0"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(read_file(t / "out/image_1.png"), made);
}

TEST_F(ImageToImage, FoldersOfItsPipelinesOpen) {
  const std::string folder = t / "model";
  std::filesystem::copy(sd, folder, std::filesystem::copy_options::recursive);
  nlohmann::json index = parse_json(read_file(folder + "/model_index.json"));
  const Words words = {"image=" + (t / "photo.png"), "height=16", "width=16", "output_type=latent"};
  std::string first;
  for (const char* name :
       {"StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"}) {
    index["_class_name"] = name;
    write_file_atomic(folder + "/model_index.json", index.dump());
    std::filesystem::remove_all(t / "out");
    const Outcome o = generate(folder, words);
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_FALSE(contains(o.err, "warning")) << o.err;
    const std::string made = read_file(t / "out/latents.safetensors");
    if (first.empty()) first = made;
    EXPECT_EQ(made, first) << name;
  }
}

TEST_F(ImageToImage, FoldersWithControlNetsOrAnAdapterUseThemWhereThereAreImages) {
  const std::string net = kGoldens + "pipelines/controlnet", adapter = kGoldens + "adapters/sd_t2i";
  const auto folder_of = [&](const char* name, const char* pipeline, const char* part, const char* class_name) {
    std::filesystem::copy(sd, t / name, std::filesystem::copy_options::recursive);
    const std::string file = t / name + "/model_index.json";
    nlohmann::json index = parse_json(read_file(file));
    index["_class_name"] = pipeline, index[part] = {"diffusers", class_name};
    write_file_atomic(file, index.dump());
    return t / name;
  };
  const std::string controlled =
      folder_of("controlled", "StableDiffusionControlNetImg2ImgPipeline", "controlnet", "MultiControlNetModel");
  for (const char* part : {"/controlnet", "/controlnet_1"}) std::filesystem::copy(net, controlled + part);
  const std::string adapted = folder_of("adapted", "StableDiffusionAdapterPipeline", "adapter", "T2IAdapter");
  std::filesystem::copy(adapter, adapted + "/adapter");
  const auto made = [&](const std::string& folder, Words words, const char* command = "generate") {
    words.insert(words.begin(), {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                 "pretrained_model_name_or_path=" + folder, "output_dir=" + (t / "out"),
                                 "num_inference_steps=2", "prompt=red", "height=16", "width=16", "output_type=latent"});
    std::filesystem::remove_all(t / "out");
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.status == 0 ? SafetensorsReader::open(t / "out/latents.safetensors").tensors().at("latents").to_doubles()
                         : std::vector<double>();
  };
  const std::vector<double> plain = made(sd, {});
  EXPECT_EQ(made(controlled, {}), plain);
  EXPECT_EQ(made(adapted, {}), plain);

  const std::string photo = t / "photo.png", other = t / "other.png", control = "generate_controlnet",
                    images = "controlnet_image=[" + photo + "," + other + "]";
  const std::vector<double> by_key =
      made(sd, {"controlnet_model_name_or_path=[" + net + "," + net + "]", images}, control.c_str());
  EXPECT_NE(by_key, plain);
  EXPECT_EQ(made(controlled, {images}, control.c_str()), by_key);
  const Words one = {"controlnet_model_name_or_path=" + net, "controlnet_image=" + photo};
  EXPECT_EQ(made(controlled, one, control.c_str()), made(sd, one, control.c_str()));

  const std::string image_word = "t2i_adapter_image=" + photo, key = "t2i_adapter=" + adapter;
  const std::vector<double> with_adapter = made(sd, {image_word, key});
  EXPECT_NE(with_adapter, plain);
  EXPECT_EQ(made(adapted, {image_word}), with_adapter);
  EXPECT_EQ(made(adapted, {image_word, key}), with_adapter);
}

TEST_F(ImageToImage, OfAMaskIsNewWhereItIsWhiteAlone) {
  const std::string right = mask(16, 16, 8, 16);
  const Words words = {right, "strength=1", "scheduler=euler"};
  Words other = words;
  other.emplace_back("prompt=blue");
  const std::vector<double> a = latents(words), b = latents(other);  // [1, 4, 8, 8]
  int changed = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool left = i % 8 < 4;
    if (left) {
      EXPECT_EQ(a[i], b[i]) << i;
    }
    changed += !left && a[i] != b[i];
  }
  EXPECT_EQ(changed, 4 * 8 * 4);
  // Steps that reuse predictions respect the mask too.
  Words cached = words;
  cached.emplace_back("use_sen_cache=true");
  const std::vector<double> reused = latents(cached);
  for (size_t i = 0; i < a.size(); ++i)
    if (i % 8 < 4) {
      EXPECT_EQ(a[i], reused[i]) << i;
    }
  // Grown by two pixels, the mask covers one more latent column; blurred, it affects all columns.
  Words grown = other, blurred = other;
  grown.emplace_back("mask_grow=2"), blurred.emplace_back("mask_blur=3");
  const std::vector<double> wide = latents(grown), soft = latents(blurred);
  int same = 0, soft_same = 0;
  for (size_t i = 0; i < a.size(); ++i) same += wide[i] == b[i] && i % 8 < 3, soft_same += soft[i] == b[i];
  EXPECT_EQ(same, 4 * 8 * 3);
  EXPECT_NE(wide[3], b[3]);
  EXPECT_LT(soft_same, 4 * 8 * 4);
}

TEST_F(ImageToImage, OfAPartIsPutBackIntoTheWhole) {
  const HostArray photo = decode_image(t / "photo.png");  // 37 × 50
  const HostArray made = pixels(sd, {"image=" + (t / "photo.png"), "mask_image=" + (t / "mask.png"),
                                     "padding_mask_crop=2", "height=16", "width=16", "strength=0.9"});
  ASSERT_EQ(made.dims(), photo.dims());
  int changed = 0;
  for (size_t i = 0; i < made.view<uint8_t>().size(); ++i) {
    const size_t x = i / 3 % 50, y = i / 150;
    const bool white = x >= 5 && x < 30 && y >= 8 && y < 21;
    if (!white) {
      EXPECT_EQ(made.view<uint8_t>()[i], photo.view<uint8_t>()[i]) << x << ' ' << y;
    }
    changed += white && made.view<uint8_t>()[i] != photo.view<uint8_t>()[i];
  }
  EXPECT_GT(changed, 500);
  // With two images, each result goes into its own image.
  HostArray turned(photo.shape());
  std::ranges::reverse_copy(photo.view<uint8_t>(), turned.mutable_view<uint8_t>().begin());
  write_png(t / "turned.png", turned);
  std::filesystem::remove_all(t / "out");
  const Outcome o = generate(sd, {"image=" + (t / "photo.png") + "," + (t / "turned.png"), "prompt=[\"red\", \"blue\"]",
                                  "mask_image=" + (t / "mask.png"), "padding_mask_crop=2", "height=16", "width=16"});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const auto& [file, whole] : {std::pair("out/image_0.png", photo), {"out/image_1.png", turned}}) {
    const HostArray each = decode_image(t / file);
    constexpr size_t kAbove = size_t{8} * 150;  // bytes of the rows that the mask leaves
    EXPECT_TRUE(std::ranges::equal(each.view<uint8_t>().first(kAbove), whole.view<uint8_t>().first(kAbove))) << file;
  }
}

TEST_F(ImageToImage, IsContinuedBeyondItsSides) {
  const std::string other = "image=" + (t / "other.png");  // 24 × 24
  EXPECT_EQ(pixels(sd, {other, "outpaint=8,0,4,6", "scheduler=euler"}).dims(), (Dims{30, 36, 3}));
  EXPECT_TRUE(contains(read_file(t / "out/image_0.png"), "Denoising strength: 1, "));
  std::vector<std::vector<double>> made;
  for (const char* prompt : {"prompt=red", "prompt=blue"}) {
    const Outcome o = generate(
        sd, {other, "outpaint=8,0,4,6", "scheduler=euler", "output_type=latent", prompt, "output_dir=" + (t / prompt)});
    ASSERT_EQ(o.status, 0) << o.err;
    const HostArray latents = SafetensorsReader::open((t / prompt) + "/latents.safetensors").tensors().at("latents");
    EXPECT_EQ(latents.dims(), (Dims{1, 4, 15, 18}));
    made.push_back(latents.to_doubles());
  }
  for (size_t i = 0; i < made[0].size(); ++i) {
    const size_t x = i % 18, y = i / 18 % 15;
    const bool inside = x >= 4 && x < 16 && y < 12;
    EXPECT_EQ(made[0][i] == made[1][i], inside) << x << ' ' << y;
  }
}

TEST_F(ImageToImage, OfAMaskIsGeneratedAgainFromItsFileToTheBit) {
  ASSERT_EQ(
      generate(inpainting, {"image=" + (t / "photo.png"), "mask_image=" + (t / "mask.png"), "mask_grow=1"}).status, 0);
  const std::string made = read_file(t / "out/image_0.png");
  EXPECT_TRUE(contains(made, "\nmask_image: ") && contains(made, "\nmask_grow: 1\n"));
  const Outcome o = maxdiffusion({"generate", t / "out/image_0.png", "xla_flags=--xla_backend_optimization_level=0"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(read_file(t / "out/image_1.png"), made);
}

TEST_F(ImageToImage, OfASampleEnlargedIsTheSecondOfTwo) {
  const Words small = {"height=16", "width=24", "scheduler=euler", "sample_seed=4"};
  Words at_once = small;
  at_once.insert(at_once.end(), {"hires_scale=2", "hires_strength=0.5"});
  const HostArray whole = pixels(sd, at_once);
  EXPECT_EQ(whole.dims(), (Dims{32, 48, 3}));
  const std::string text = read_file(t / "out/image_0.png");
  EXPECT_TRUE(contains(text, "Denoising strength: 0.5, Hires upscale: 2, Hires upscaler: Lanczos, "));
  pixels(sd, small);
  std::filesystem::rename(t / "out/image_0.png", t / "first.png");
  const HostArray second = pixels(
      sd, {"image=" + (t / "first.png"), "height=32", "width=48", "strength=0.5", "scheduler=euler", "sample_seed=4"});
  EXPECT_TRUE(std::ranges::equal(whole.view<uint8_t>(), second.view<uint8_t>()));
  // With several prompts and samples, each sample keeps its prompt.
  const Words two = {"prompt=[\"a red heart\", \"blue\"]", "num_images_per_prompt=2", "only_image=2"};
  Words several = two;
  several.insert(several.end(), {"height=16", "width=16", "hires_scale=1.5", "scheduler=euler"});
  EXPECT_EQ(pixels(sd, several).dims(), (Dims{24, 24, 3}));
  EXPECT_TRUE(contains(read_file(t / "out/image_0.png"), "iTXtparameters") &&
              contains(read_file(t / "out/image_0.png"), "blue\nSteps: 4"));
}

TEST_F(ImageToImage, RefusesRefinersThatDoNotFit) {
  const std::string photo = "image=" + (t / "photo.png"), sdxl = kGoldens + "pipelines/sdxl",
                    refiner = "refiner=" + kGoldens + "refiner/refiner";
  for (const auto& [folder, words, message] : std::vector<std::tuple<std::string, Words, std::string>>{
           {sdxl, {refiner, photo}, "refiner is given with image or mask_image; expected one of them"},
           {sdxl, {refiner, "hires_scale=2"}, "refiner is given with hires_scale; expected one of them"},
           {sdxl, {refiner, "denoising_start=0.5"}, "refiner is given with denoising_start; expected one of them"},
           {sd, {refiner}, "has latents of 4 channels, scaled by 0.13025; expected 4 and 0.18215"},
           {sdxl, {"refiner=" + (t / "nowhere")}, "nowhere"},
           {sd, {"denoising_start=0.5"}, "denoising_start is 0.5 without image; expected image=FILE too"},
           {sd,
            {photo, "denoising_start=0.9999", "scheduler=euler"},
            "and so none of num_inference_steps=4 steps runs"},
           {sd, {photo, "denoising_start=0.5", "denoising_end=0.4"}, "denoising_end 0.4; expected a smaller start"},
           {sd, {photo, mask(37, 50, 0, 20), "denoising_start=0.5"}, "expected strength in its place"},
           {sd, {photo, "denoising_start=0.5", "scheduler=heun"}, "which calls the model several times a step"},
           {sd, {"denoising_end=0.0001"}, "denoising_end is 0.0001, and so no step runs"},
           {sd, {"denoising_end=1"}, "denoising_end is `1`, expected"}}) {
    const Outcome o = generate(folder, words);
    EXPECT_NE(o.status, 0) << message;
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
  const Outcome o = generate(sdxl, {refiner, "height=16", "width=16"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(read_file(t / "out/image_sdxl_0.png"), ", Refiner: refiner, Refiner switch at: 0.8, Image: "));
}

TEST_F(ImageToImage, RefusesMasksThatMeanNothing) {
  write_file_atomic(t / "text.png", "no image");
  const std::string photo = "image=" + (t / "photo.png"), white = "mask_image=" + (t / "mask.png"),
                    black = mask(37, 50, 0, 0), wan = kGoldens + "wan/t2v", gone = "mask_image=" + (t / "text.png");
  struct Refused {
    std::string folder;
    Words words;
    int status;
    std::string message;
  };
  for (const Refused& r : std::vector<Refused>{
           {sd,
            {white},
            2,
            "mask_image, padding_mask_crop or outpaint is given without image; expected image=FILE too"},
           {sd, {"outpaint=1,2,3,4"}, 2, "is given without image; expected image=FILE too"},
           {sd, {photo, "padding_mask_crop=2"}, 2, "padding_mask_crop is given without mask_image"},
           {sd, {photo, black, "padding_mask_crop=2"}, 2, "mask_image is black; expected white where"},
           {sd, {photo, "outpaint=1,2,3"}, 2, "outpaint is [1, 2, 3]; expected the pixels that are added"},
           {sd, {photo, "outpaint=1,2,3,400000"}, 2, "up to 16384 each"},
           {sd, {photo, gone}, 4, t / "text.png"},
           {sd, {photo, white, "hires_scale=2"}, 2, "hires_scale is 2 with mask_image or outpaint; expected 1"},
           {inpainting, {}, 2, "mask_image: empty; this is an inpainting model, which takes an image and a mask"},
           {inpainting, {photo}, 2, "try: image=FILE mask_image=FILE, or outpaint=64,0,64,0"},
           {wan,
            {"hires_scale=2", "height=32", "width=32", "num_frames=5"},
            2,
            "hires_scale is 2; expected 1: this model"},
           {wan,
            {photo, white, "height=32", "width=32", "num_frames=5"},
            2,
            "image: an image is given; expected a video, as in image=clip.mp4"}}) {
    const Outcome o = generate(r.folder, r.words);
    EXPECT_EQ(o.status, r.status) << r.message << "\n" << o.err;
    EXPECT_TRUE(contains(o.err, r.message)) << r.message << "\n" << o.err;
  }
}

}  // namespace
}  // namespace md
