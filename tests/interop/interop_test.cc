// The usual packages can read what the program writes: runs the scripts tools/check_*.py with the packages of
// cmake/wheels_interop.txt, which `./run test interop` fetches.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"
#include "tests/server/server.h"
#include "tests/single_file/wide_folder.h"

namespace md {
namespace {

using Words = std::vector<std::string>;
const std::string kPackages = MD_DEPS_DIR "/interop";
const std::string kImages = MD_SOURCE_DIR "/tests/golden/pipelines/";

class Interop : public testing::Test {
 protected:
  void SetUp() override {
    if (!exists(kPackages + "/torch")) GTEST_SKIP() << "no " << kPackages << ": ./run test interop makes it";
  }
  /// Trains two steps on random data as a run of this name.
  Outcome train(const std::string& name, const std::string& folder, const Words& extra) {
    Words words = {"train",
                   MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "run_name=" + name,
                   "output_dir=" + t.path(),
                   "pretrained_model_name_or_path=" + folder,
                   "dataset_type=synthetic",
                   "synthetic_num_samples=2",
                   "per_device_batch_size=1",
                   "max_train_steps=2",
                   "learning_rate=1e-3"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  Outcome check(const std::string& script, const std::string& words) const {
    return shell("cd " + t.path() + " && OMP_NUM_THREADS=1 PYTHONPATH=" + kPackages +
                 " /usr/bin/python3 " MD_SOURCE_DIR "/tools/" + script + " " + words);
  }
  TemporaryFolder t;
};

TEST_F(Interop, DiffusersLoadsTheWordsThatAreTrained) {
  make_folders(t / "images");
  for (int i = 0; i < 2; ++i) write_png(t / fmt::format("images/{}.png", i), HostArray(Shape{DType::u8, {16, 16, 3}}));
  for (const std::string model : {"sd", "sdxl"}) {
    const Outcome run = maxdiffusion({"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=" + model,
                                      "output_dir=" + t.path(), "pretrained_model_name_or_path=" + kImages + model,
                                      "train_data_dir=" + (t / "images"), "resolution=16", "per_device_batch_size=1",
                                      "max_train_steps=2", "learning_rate=1e-2", "placeholder_token=<new>",
                                      "initializer_token=red", "num_vectors=2"});
    ASSERT_EQ(run.status, 0) << run.err;
    const std::string file = t / (model + "/checkpoints/2/learned_embeds");
    const Outcome o = check("check_inversion.py", kImages + model + " --size 16 " + file + ".safetensors" +
                                                      (model == "sdxl" ? " " + file + "_2.safetensors" : ""));
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    EXPECT_TRUE(contains(o.out, "<new>: 2 vectors of 16\n")) << o.out;
    EXPECT_TRUE(contains(o.out, ": 16x16 image")) << o.out;
  }
}

// S2-116…119, S4-104…107
TEST_F(Interop, DiffusersLoadsCheckpointsWholeAndSamplesAndTensorBoardReadsTheMetrics) {
  ASSERT_EQ(train("run", kImages + "sd", {"resolution=16"}).status, 0);
  const std::string checkpoint = t / "run/checkpoints/2";
  Outcome o = check("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "unet: UNet2DConditionModel, 52,004 parameters\n")) << o.out;
  EXPECT_TRUE(contains(o.out, "StableDiffusionPipeline: 16x16 image")) << o.out;
  // The check must be able to fail.
  auto config = parse_json(read_file(checkpoint + "/unet/config.json"));
  config["num_class_embeds"] = 10;
  write_file_atomic(checkpoint + "/unet/config.json", config.dump());
  o = check("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 1) << o.out << o.err;
  EXPECT_TRUE(contains(o.err, "FAILED unet: missing_keys: ")) << o.err;

  o = check("check_events.py", t / "run");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "ok: 2 steps agree")) << o.out;
  for (const char* tag :
       {"learning/loss", "learning/current_learning_rate", "perf/per_device_tflops", "perf/step_time_seconds"})
    EXPECT_TRUE(contains(o.out, tag)) << o.out;
}

/// A family with a transformer denoiser, fully trained and sampled by diffusers' pipeline.
struct Trained {
  const char *name, *folder;
  Words train, check;
  const char* says;
  int lora_pairs;
};
void PrintTo(const Trained& f, std::ostream* os) { *os << f.name; }
class TrainedFamilies : public Interop, public testing::WithParamInterface<Trained> {};

TEST_P(TrainedFamilies, AreLoadedWholeAndSampledByDiffusers) {
  const Trained& family = GetParam();
  Outcome o = train("run", MD_SOURCE_DIR "/tests/golden/" + std::string(family.folder), family.train);
  ASSERT_EQ(o.status, 0) << o.err;
  std::string words = (t / "run/checkpoints/2") + " --steps 2 --max_sequence_length 12";
  for (const std::string& word : family.check) words += " " + word;
  o = check("check_checkpoint.py", words);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, family.says)) << o.out;
}

const Trained kFamilies[] = {{"Wan",
                              "wan/t2v",
                              {"height=32", "width=32", "num_frames=5", "max_sequence_length=12"},
                              {"--size", "32", "--num_frames", "5"},
                              "WanPipeline: 32x32 image",
                              20},
                             {"Flux2Klein",
                              "flux2/base",
                              {"resolution=16", "max_sequence_length=12", "text_encoder_out_layers=[1,2,3]"},
                              {"--size", "16", "--text_encoder_out_layers", "[1,2,3]"},
                              "Flux2KleinPipeline: 16x16 image",
                              12},
                             {"ZImage",
                              "zimage/base",
                              {"resolution=16", "max_sequence_length=32"},
                              {"--size", "16", "--guidance_scale", "2"},
                              "ZImagePipeline: 16x16 image",
                              16},
                             {"QwenImage",
                              "qwenimage/base",
                              {"resolution=16", "max_sequence_length=32"},
                              {"--size", "16"},
                              "QwenImagePipeline: 16x16 image",
                              8}};
/// Trained on pairs. diffusers' pipelines need torchvision to prepare images, so they do not sample here.
const Trained kEditingFamilies[] = {
    {"QwenImageEdit", "qwenimage_edit/edit", {"resolution=32", "cond_image_column=source"}, {}, "", 8},
    {"QwenImageEditPlus", "qwenimage_edit/plus", {"resolution=32", "cond_image_column=source,pose"}, {}, "", 8}};
std::string name_of(const testing::TestParamInfo<Trained>& of) { return of.param.name; }

INSTANTIATE_TEST_SUITE_P(Interop, TrainedFamilies, testing::ValuesIn(kFamilies), name_of);

TEST_F(Interop, DiffusersReadsEveryKeyOfLoraFilesAndAllOfThemChangeTheSame) {
  ASSERT_EQ(train("run", kImages + "sdxl", {"resolution=16", "train_lora=true", "lora_rank=2"}).status, 0);
  const std::string place = t / "run/checkpoints/2/", peft = place + "pytorch_lora_weights.safetensors";
  Outcome o = check("check_lora.py", kImages + "sdxl " + peft + " " + place + "lora_kohya.safetensors");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "largest distance from pytorch_lora_weights.safetensors: ")) << o.out;
  o = check("check_lora.py", kImages + "sdxl " + peft + " " + kImages + "lora_peft.safetensors");
  EXPECT_EQ(o.status, 1) << "another LoRA changes other weights: " << o.out;
}

TEST_F(Interop, AdaptersOfEveryKindAreReadByDiffusersAndPeft) {
  const std::string model = t / "model";  // whose numbers do not round what is merged
  ASSERT_EQ(maxdiffusion({"convert", kImages + "sd", model, "dtype=float32"}).status, 0);
  for (const auto& [kind, files] : {std::pair{"lora", std::vector{"pytorch_lora_weights.safetensors"}},
                                    {"dora", {"pytorch_lora_weights.safetensors"}},
                                    {"loha", {"peft/unet"}},
                                    {"lokr", {"pytorch_lora_weights.safetensors", "peft/unet"}},
                                    {"ia3", {"peft/unet"}}}) {
    SCOPED_TRACE(kind);
    const std::string name = kind, merged = t / (name + "_merged");
    Words words = {"resolution=16", "train_lora=true", "adapter=" + name, "learning_rate=0.05",
                   name == "lokr" ? "lora_rank=1" : "lora_rank=2"};
    if (name == "ia3") words.emplace_back("feedforward_modules=to_out.0");
    if (name == "lora") words.insert(words.end(), {"use_rslora=true", "rank_pattern={to_q: 3}", "conv_dim=2"});
    ASSERT_EQ(train(name, model, words).status, 0);
    const std::string place = t / (name + "/checkpoints/2");
    ASSERT_EQ(maxdiffusion({"lora", "merge", place, merged}).status, 0);
    Outcome o = check("check_adapters.py", model + " " + place + " " + merged);
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    for (const char* file : files) EXPECT_TRUE(contains(o.out, file + std::string(": "))) << o.out;
    o = check("check_adapters.py", model + " " + place + " " + model);
    EXPECT_EQ(o.status, 1) << "the model itself is not the merged one: " << o.out;
  }
}

TEST_F(Interop, GgufAndScaledFloat8FilesAreReadByTheirPackagesAndGgufByDiffusers) {
  const auto convert = [&](const std::string& from, const std::string& file, const std::string& dtype) {
    std::filesystem::remove(t / file);
    const Outcome o = maxdiffusion({"convert", from, t / file, "component=transformer", "dtype=" + dtype});
    ASSERT_EQ(o.status, 0) << o.err;
  };
  for (const auto& [family, changes] : {std::pair{"flux/dev", kWideFlux}, {"wan/t2v", kWideWan}}) {
    SCOPED_TRACE(family);
    const std::string from = t / std::filesystem::path(family).parent_path().string(), reference = t / "r.safetensors";
    write_wide_folder(family, from, changes);
    convert(from, "r.safetensors", "float32");
    for (const auto& [file, dtype, most] : {std::tuple{"a.gguf", "q8_0", "0.01"},
                                            {"b.gguf", "q4_0", "0.15"},
                                            {"c.safetensors", "float8_e4m3fn", "0.04"}}) {
      SCOPED_TRACE(dtype);
      convert(from, file, dtype);
      // diffusers only converts FLUX.1 names at the published width.
      const bool loaded = family == std::string("wan/t2v") && file != std::string("c.safetensors");
      const std::string words = fmt::format("{} {} --most ", t / file, reference);
      Outcome o = check("check_few_bits.py", words + most + (loaded ? " --model " + from + "/transformer" : ""));
      EXPECT_EQ(o.status, 0) << o.out << o.err;
      EXPECT_EQ(contains(o.out, "WanTransformer3DModel: "), loaded) << o.out;
      o = check("check_few_bits.py", words + "0");
      EXPECT_EQ(o.status, 1) << "numbers of few bits are not those before: " << o.out;
    }
  }
}

TEST_F(Interop, AGgufFileOfAQwenEncoderHasTheNamesOfThePackageGguf) {
  write_wide_folder("zimage/base", t / "zimage", kWideQwen3, "text_encoder");
  const auto convert = [&](const std::string& file, const std::string& dtype) {
    const Outcome o = maxdiffusion({"convert", t / "zimage", t / file, "component=text_encoder", "dtype=" + dtype});
    ASSERT_EQ(o.status, 0) << o.err;
  };
  convert("r.safetensors", "float32");
  convert("a.gguf", "q8_0");
  const std::string words = (t / "a.gguf") + " " + (t / "r.safetensors") + " --most 0.01 --arch ";
  Outcome o = check("check_few_bits.py", words + "QWEN3");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "Q8_0: ")) << o.out;
  o = check("check_few_bits.py", words + "T5ENCODER");
  EXPECT_EQ(o.status, 1) << o.out;
}

TEST_F(Interop, OpenAisPackageGeneratesAndEditsWithTheServer) {
  HostArray photo(Shape{DType::u8, {16, 16, 3}}), mask = HostArray(photo.shape());
  auto colours = photo.mutable_view<uint8_t>(), white = mask.mutable_view<uint8_t>();
  for (size_t i = 0; i < colours.size(); ++i)
    colours[i] = static_cast<uint8_t>(i * 7 % 251), white[i] = i / 3 % 16 < 8 ? 255 : 0;
  write_png(t / "photo.png", photo), write_png(t / "mask.png", mask);
  TestServer server({kImages + "sd", "height=16", "width=16", "num_inference_steps=2", "api_key=secret"});
  Outcome o = check("check_openai.py", fmt::format("http://127.0.0.1:{} secret {}", server.port(), t.path()));
  EXPECT_EQ(o.status, 0) << o.out << o.err << server.log();
  EXPECT_TRUE(contains(o.out, "models: sd\nrefused: model is 'none'; expected one of: sd\n")) << o.out;
  const auto pixels_of_command = [&](Words words) {
    std::filesystem::remove_all(t / "out");
    words.insert(words.begin(), {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                 "pretrained_model_name_or_path=" + kImages + "sd", "output_dir=" + (t / "out"),
                                 "num_inference_steps=2"});
    EXPECT_EQ(maxdiffusion(words).status, 0);
    return pixels_of(t / "out/image_0.png");
  };
  const std::string generated =
      pixels_of_command({"prompt=a red heart", "sample_seed=5", "scheduler=euler", "height=16", "width=16"});
  EXPECT_TRUE(pixels_of(t / "generated.png") == generated);
  EXPECT_TRUE(pixels_of(t / "url.png") == generated);
  EXPECT_TRUE(pixels_of(t / "edited.png") ==
              pixels_of_command(
                  {"prompt=a hat", "sample_seed=3", "image=" + (t / "photo.png"), "mask_image=" + (t / "mask.png")}));
}

class TrainedLoras : public TrainedFamilies {};
TEST_P(TrainedLoras, AreReadByDiffusersToTheLastKey) {
  const Trained& family = GetParam();
  const std::string folder = MD_SOURCE_DIR "/tests/golden/" + std::string(family.folder);
  Words words = family.train;
  words.insert(words.end(), {"train_lora=true", "lora_rank=2"});
  Outcome o = train("run", folder, words);
  ASSERT_EQ(o.status, 0) << o.err;
  o = check("check_lora.py", folder + " " + (t / "run/checkpoints/2/pytorch_lora_weights.safetensors"));
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, fmt::format(": {0} pairs change {0} weights", family.lora_pairs))) << o.out;
}

INSTANTIATE_TEST_SUITE_P(Interop, TrainedLoras, testing::ValuesIn(kFamilies), name_of);
INSTANTIATE_TEST_SUITE_P(InteropOfPairs, TrainedLoras, testing::ValuesIn(kEditingFamilies), name_of);

}  // namespace
}  // namespace md
