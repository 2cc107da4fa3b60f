// The commands for LoRA files, run as by a user.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "maxdiffusion/checkpoint/safetensors.h"
#include "tests/cli/command.h"
#include "tests/single_file/models.h"

namespace md {
namespace {

const std::string kGolden = MD_SOURCE_DIR "/tests/golden/pipelines";

struct LoraTools : testing::Test {
  LoraTools() { write_folder("sdxl", folder); }
  Outcome lora(std::vector<std::string> words) {
    words.insert(words.begin(), "lora");
    Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o;
  }
  HostArray generate(const std::string& name, std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + (t / name),
                  "prompt=red heart", "height=16", "width=16", "num_inference_steps=2", "output_type=np", "seed=3"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.status == 0 ? SafetensorsReader::open(t / name + "/images.safetensors").tensors().at("images")
                         : HostArray();
  }
  TemporaryFolder t;
  const std::string folder = t / "folder",
                    files = kGolden + "/lora_peft.safetensors," + kGolden + "/lora_kohya.safetensors";
};

double distance(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double difference = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) difference += (x[i] - y[i]) * (x[i] - y[i]), size += y[i] * y[i];
  return std::sqrt(difference / size);
}

TEST_F(LoraTools, MergedModelsSampleAsTheirFilesDo) {
  const HostArray expected =
      generate("a", {"pretrained_model_name_or_path=" + folder, "lora_files=" + files, "lora_scales=0.8,0.5"});
  lora({"merge", folder, t / "merged", "lora_files=" + files, "lora_scales=0.8,0.5"});
  const HostArray generated = generate("b", {"pretrained_model_name_or_path=" + (t / "merged")});
  ASSERT_EQ(generated.dims(), expected.dims());
  EXPECT_TRUE(std::equal(generated.data(), generated.data() + generated.bytes(), expected.data()));
  // Also into a single file.
  lora({"merge", folder, t / "merged.safetensors", "lora_files=" + files, "lora_scales=0.8,0.5"});
  const HostArrays original = original_of_folder("sdxl", t / "merged"),
                   file = SafetensorsReader::open(t / "merged.safetensors").tensors();
  ASSERT_EQ(file.size(), original.size());
  for (const auto& [name, array] : original)
    EXPECT_TRUE(std::equal(array.data(), array.data() + array.bytes(), file.at(name).data())) << name;

  // Adding the extracted difference to the first model gives the merged model again.
  const Outcome o =
      lora({"extract", folder, t / "merged", t / "taken.safetensors", "rank=8", "conv_rank=8", "dtype=float32"});
  EXPECT_TRUE(contains(o.err, "keep 100.00 % of the difference")) << o.err;
  const HostArray again =
      generate("c", {"pretrained_model_name_or_path=" + folder, "lora_files=" + (t / "taken.safetensors")});
  EXPECT_LT(distance(again, expected), 1e-4);
  const auto metadata = SafetensorsReader::open(t / "taken.safetensors").metadata();
  EXPECT_EQ(metadata.at("ss_base_model_version"), "sdxl_base_v1-0");
  EXPECT_EQ(metadata.at("ss_network_module"), "networks.lora");
  EXPECT_EQ(metadata.at("ss_sd_model_name"), "folder");
  EXPECT_EQ(maxdiffusion({"lora", "extract", folder, folder, t / "none.safetensors"}).status, 2);
}

TEST_F(LoraTools, MergedModelsOfAWiderTypeAreNotRoundedToTheStoredOne) {
  const std::string stored = kGolden + "/sdxl", words = "lora_files=" + files;  // of bfloat16
  lora({"merge", folder, t / "whole", words});                                  // of float32
  lora({"merge", stored, t / "wider", words, "dtype=float32"});
  const HostArrays whole = weights_of_folder(t / "whole");
  for (const auto& [key, array] : weights_of_folder(t / "wider")) {
    ASSERT_EQ(array.dtype(), DType::f32) << key;
    EXPECT_EQ(array.to_doubles(), whole.at(key).to_doubles()) << key;
  }
}

TEST_F(LoraTools, ResizedFilesSayWhatTheyKeepAndAreReadInTheirLayout) {
  for (const char* name : {"lora_peft", "lora_kohya"}) {
    const std::string from = kGolden + "/" + name + ".safetensors", to = t / std::string(name) + "_same.safetensors";
    // Resized to its current rank: the same product, including alpha.
    Outcome o = lora({"resize", from, to, "rank=2", "dtype=float32"});
    EXPECT_TRUE(contains(o.out, "100.00 % of the sum of squares kept")) << o.out;
    lora({"merge", folder, t / std::string(name) + "_a", "lora_files=" + from});
    lora({"merge", folder, t / std::string(name) + "_b", "lora_files=" + to});
    const HostArrays a = weights_of_folder(t / std::string(name) + "_a"),
                     b = weights_of_folder(t / std::string(name) + "_b");
    size_t changed = 0;
    for (const auto& [key, array] : weights_of_folder(folder)) {
      EXPECT_LT(distance(b.at(key), a.at(key)), 1e-5) << key;
      changed += distance(a.at(key), array) > 0 ? 1 : 0;
    }
    EXPECT_GT(changed, 10U);
    o = lora({"resize", from, t / std::string(name) + "_thin.safetensors", "rank=1"});
    EXPECT_TRUE(contains(o.out, "rank 1 (")) << o.out;
    EXPECT_FALSE(contains(o.out, "100.00 %")) << o.out;
    EXPECT_EQ(SafetensorsReader::open(t / std::string(name) + "_thin.safetensors").tensors().size(),
              SafetensorsReader::open(from).tensors().size());
  }
}

TEST_F(LoraTools, InfoPrintsRankAlphaTargetsAndMetadata) {
  const Outcome o = lora({"info", kGolden + "/lora_kohya.safetensors"});
  for (const char* part : {"lora_unet: ", "rank: 2 (", "alpha: 1 (", "type: ", "to_q (16)"})
    EXPECT_TRUE(contains(o.out, part)) << o.out;
  const Outcome peft = lora({"info", kGolden + "/lora_peft.safetensors"});
  for (const char* part : {"text_encoder: ", "unet: ", "metadata "}) EXPECT_TRUE(contains(peft.out, part)) << peft.out;
  EXPECT_EQ(maxdiffusion({"lora", "shrink"}).status, 2);
  // A folder means its only file.
  std::filesystem::create_directories(t / "one");
  std::filesystem::copy(kGolden + "/lora_kohya.safetensors", t / "one/style.safetensors");
  const Outcome of_folder = lora({"info", t / "one"});
  EXPECT_EQ(of_folder.out.substr(of_folder.out.find('\n')), o.out.substr(o.out.find('\n')));
  EXPECT_TRUE(of_folder.out.starts_with(t / "one/style.safetensors")) << of_folder.out;
  const Outcome small = lora({"resize", t / "one", t / "small.safetensors", "rank=1"});
  EXPECT_TRUE(contains(small.out, "rank 1")) << small.out;
}

TEST_F(LoraTools, MergeHasNoKeysOfTraining) {
  const std::string log = maxdiffusion({"help", "lora"}).out;
  EXPECT_TRUE(contains(log, "  lora_scales: ")) << log;
  EXPECT_FALSE(contains(log, "train_lora")) << log;
  const Outcome o = maxdiffusion({"lora", "merge", folder, t / "merged", "lora_files=" + files, "lora_rank=2"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "lora_rank")) << o.err;
  EXPECT_FALSE(exists(t / "merged"));
}

}  // namespace
}  // namespace md
