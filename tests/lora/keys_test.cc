// The LoRA keys as config files and command lines set them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/config/config.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "tests/lora/models.h"

namespace md {
namespace {

struct LoraKeyTest : testing::Test {
  TemporaryFolder folder;
  LoraKeys parsed(const std::string& yaml, const std::vector<std::string>& words = {}) {
    LoraKeys keys;
    KeyList list;
    list.add(keys);
    list.assign(ConfigSource::from_text(yaml, words));
    return keys;
  }
  std::string file(const std::string& name) {
    std::filesystem::create_directories(std::filesystem::path(folder / name).parent_path());
    std::ofstream(folder / name) << "x";
    return folder / name;
  }
  std::string refusal(const std::string& yaml, const std::vector<std::string>& words = {}) {
    return message_of([&] { chosen_loras(parsed(yaml, words)); });
  }
};

TEST_F(LoraKeyTest, NameFilesAndScalesOnTheCommandLine) {
  const std::string a = file("a.safetensors"), b = file("b.safetensors");
  const auto chosen = chosen_loras(parsed("", {"lora_files=" + a + "," + b, "lora_scales=0.8,0.5"}));
  ASSERT_EQ(chosen.size(), 2u);
  EXPECT_EQ(chosen[0].path, a);
  EXPECT_EQ(chosen[0].scale, 0.8);
  EXPECT_EQ(chosen[1].path, b);
  EXPECT_EQ(chosen[1].scale, 0.5);
  EXPECT_EQ(chosen_loras(parsed("lora_files: ['" + a + "']")).at(0).scale, 1);
  EXPECT_TRUE(chosen_loras(parsed("")).empty());
}

TEST_F(LoraKeyTest, NameFoldersOfOneFileOrOfPeft) {
  const std::string one = file("one/style.safetensors"), peft = file("peft/adapter_model.safetensors");
  file("peft/other.safetensors"), file("two/a.safetensors"), file("two/b.safetensors");
  const auto path = [&](const char* name) {
    return chosen_loras(parsed("", {"lora_files=" + (folder / name)}))[0].path;
  };
  EXPECT_EQ(path("one"), one);
  EXPECT_EQ(path("peft"), peft);
  EXPECT_NE(refusal("", {"lora_files=" + (folder / "two")}).find("2 .safetensors files: a.safetensors, b.safetensors"),
            std::string::npos);
}

TEST_F(LoraKeyTest, NameBlocksStepsAndTextScalesOfEachFile) {
  const std::string a = "lora_files=" + file("a.safetensors"), both = a + "," + file("b.safetensors");
  auto chosen = chosen_loras(parsed("", {a, "lora_block_weights=1,0,.5", "lora_steps=5-10", "lora_text_scales=0"}));
  EXPECT_EQ(chosen.at(0).block_weights, "1,0,.5");
  EXPECT_EQ(chosen.at(0).text_scale, 0.0);
  const auto acts = [&](size_t i) {
    std::string out;
    for (int64_t step = 0; step < 20; ++step) out += chosen.at(i).steps.has(step, 20) ? '1' : '0';
    return out;
  };
  EXPECT_EQ(acts(0), "00000111110000000000");
  chosen = chosen_loras(parsed("lora_block_weights: [1, 0, 0.5]", {a}));
  EXPECT_EQ(chosen.at(0).block_weights, "1,0,0.5");
  EXPECT_TRUE(chosen.at(0).steps.is_whole());
  chosen = chosen_loras(parsed("", {both, "lora_block_weights=1,0;INS", "lora_steps=0.2-0.45,18-"}));
  EXPECT_EQ(chosen.at(0).block_weights, "1,0");
  EXPECT_EQ(chosen.at(1).block_weights, "INS");
  EXPECT_EQ(acts(0), "00001111100000000000");
  EXPECT_EQ(acts(1), "00000000000000000011");
  chosen = chosen_loras(parsed("lora_block_weights: ['1,0', 'INS']\nlora_steps: [-3, '-']", {both}));
  EXPECT_EQ(chosen.at(0).block_weights, "1,0");
  EXPECT_EQ(acts(0), "11100000000000000000");
  EXPECT_TRUE(chosen.at(1).steps.is_whole());
  for (const auto& [word, message] : std::map<std::string, std::string>{
           {"lora_steps=5", "lora_steps: '5' is no range of steps; expected one, as in 5-10, 0.2-0.8, 10- or -10"},
           {"lora_steps=a-b", "lora_steps: 'a-b' is no range"},
           {"lora_steps=1-2,3-4", "lora_steps is for 2 files; expected 1, as many as lora_files names"},
           {"lora_block_weights=1;2", "lora_block_weights is for 2 files; expected 1"},
           {"lora_text_scales=1,2", "lora_text_scales is for 2 files; expected 1"}})
    EXPECT_NE(refusal("", {a, word}).find(message), std::string::npos) << refusal("", {a, word});
}

// S2-100…104, S4-86…90
TEST_F(LoraKeyTest, UnderstandTheReferencesMapping) {
  file("hyper/Hyper-SDXL-2steps-lora.safetensors");
  file("own/pytorch_lora_weights.safetensors");
  const std::string extra = file("more.safetensors");
  const auto chosen = chosen_loras(parsed(
      "lora_config: {\n  lora_model_name_or_path: ['" + (folder / "hyper") + "', '" + (folder / "own") + "'],\n" + R"(
  weight_name: ["Hyper-SDXL-2steps-lora.safetensors", ""],
  adapter_name: ["hyper-sdxl", "own"],
  scale: [0.7, 2],
  from_pt: ["True", true]
})",
      {"lora_files=" + extra}));
  ASSERT_EQ(chosen.size(), 3u);
  EXPECT_EQ(chosen[0].path, folder / "hyper/Hyper-SDXL-2steps-lora.safetensors");
  EXPECT_EQ(chosen[0].scale, 0.7);
  EXPECT_EQ(chosen[1].path, folder / "own/pytorch_lora_weights.safetensors");
  EXPECT_EQ(chosen[1].scale, 2);
  EXPECT_EQ(chosen[2].path, extra);
  EXPECT_TRUE(chosen_loras(parsed(R"(lora_config: {lora_model_name_or_path: [], weight_name: [], adapter_name: [],
    scale: [], from_pt: []})"))
                  .empty());
  // S2-99, S2-102: one entry per file, and a warning that it has no effect.
  const std::string one = "lora_config: {lora_model_name_or_path: ['" + extra + "'], ";
  EXPECT_NE(refusal(one + "rank: [4, 8]}").find("rank has 2 entries, lora_model_name_or_path has 1"),
            std::string::npos);
  EXPECT_NE(refusal(one + "rank: ['a']}").find("rank holds \"a\", expected whole numbers"), std::string::npos);
  EXPECT_NE(refusal(one + "adapter_name: [a, b, c]}").find("adapter_name has 3 entries"), std::string::npos);
  EXPECT_NE(refusal(one + "adapter_name: [4]}").find("adapter_name holds 4, expected texts"), std::string::npos);
  const std::string named = one + "rank: [4]}";
  testing::internal::CaptureStderr();
  EXPECT_EQ(chosen_loras(parsed(named)).size(), 1u);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("lora_config: rank is ignored"), std::string::npos);
  EXPECT_TRUE(chosen_loras(parsed(named, {"enable_lora=false"})).empty());
  EXPECT_EQ(chosen_loras(parsed(named, {"enable_lora=false", "lora_files=" + extra})).size(), 1u);
}

// S2-99, S2-101
TEST_F(LoraKeyTest, NameFilesOfTwoDenoisers) {
  file("distilled/high.safetensors"), file("distilled/low.safetensors"), file("more/low.safetensors");
  const std::string config =
      "lora_config: {lora_model_name_or_path: ['" + (folder / "distilled") + "', '" + (folder / "more") + R"('],
    high_noise_weight_name: ["high.safetensors", ""], low_noise_weight_name: ["low.safetensors", "low.safetensors"],
    rank: [64, 32], scale: [1.0, 0.5]})";
  const auto chosen = chosen_loras(parsed(config, {"lora_files=" + file("plain.safetensors")}));
  ASSERT_EQ(chosen.size(), 4u);
  EXPECT_EQ(chosen[0].path, folder / "distilled/high.safetensors");
  EXPECT_EQ(chosen[0].denoiser, 0u);
  EXPECT_EQ(chosen[1].path, folder / "distilled/low.safetensors");
  EXPECT_EQ(chosen[1].denoiser, 1u);
  EXPECT_EQ(chosen[2].path, folder / "more/low.safetensors");
  EXPECT_EQ(chosen[2].denoiser, 1u);
  EXPECT_EQ(chosen[2].scale, 0.5);
  EXPECT_FALSE(chosen[3].denoiser.has_value());
  EXPECT_EQ(chosen_loras(parsed(config, {"enable_lora=true"})).size(), 3u);
  // Disabled files are not looked for.
  EXPECT_TRUE(
      chosen_loras(parsed("lora_config: {lora_model_name_or_path: ['absent']}", {"enable_lora=false"})).empty());
  EXPECT_NE(refusal("lora_config: {lora_model_name_or_path: ['" + (folder / "more") +
                    "'], low_noise_weight_name: ['low.safetensors'], weight_name: ['low.safetensors']}")
                .find("weight_name holds 'low.safetensors' and"),
            std::string::npos);
}

TEST_F(LoraKeyTest, NameFoldersInTheHuggingFaceCache) {
  file("hub/models--owner--distilled/snapshots/abc/high.safetensors");
  std::filesystem::create_directories(folder / "hub/models--owner--distilled/refs");
  std::ofstream(folder / "hub/models--owner--distilled/refs/main") << "abc";
  setenv("HF_HUB_CACHE", (folder / "hub").c_str(), 1);
  const auto chosen = chosen_loras(
      parsed("lora_config: {lora_model_name_or_path: ['owner/distilled'], weight_name: ['high.safetensors']}"));
  ASSERT_EQ(chosen.size(), 1u);
  EXPECT_EQ(chosen[0].path, folder / "hub/models--owner--distilled/snapshots/abc/high.safetensors");
  setenv("HF_HUB_OFFLINE", "1", 1);
  EXPECT_NE(refusal("lora_config: {lora_model_name_or_path: ['owner/absent']}").find("HF_HUB_OFFLINE=0"),
            std::string::npos);
  unsetenv("HF_HUB_CACHE");
}

// S4-86…90
TEST_F(LoraKeyTest, RefuseWhatDoesNotFit) {
  const std::string a = file("a.safetensors"), config = "lora_config: {lora_model_name_or_path: ['" + a + "'], ";
  const auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(refusal("", {"lora_files=" + a, "lora_scales=1,2"}), "lora_scales is for 2 files; expected 1");
  expect(refusal("", {"lora_files=" + (folder / "absent.safetensors")}), "does not exist");
  expect(refusal("", {"lora_files=" + file("old/pytorch_lora_weights.bin")}), "pickled");
  expect(refusal(config + "scale: [1, 2]}"), "scale has 2 entries, lora_model_name_or_path has 1");
  expect(refusal(config + "scale: ['big']}"), "expected numbers");
  expect(refusal(config + "from_pt: ['false']}"), "only true is supported");
  expect(refusal(config + "weight_name: ['b.safetensors']}"), "is not a folder");
  expect(refusal(config + "ranks: [4]}"), "unknown field 'ranks'");
  expect(refusal(config + "rank: [4, 8]}"), "rank has 2 entries, lora_model_name_or_path has 1");
  expect(refusal(config + "adapter_name: ['a', 'b']}"), "adapter_name has 2 entries, lora_model_name_or_path has 1");
}

TEST_F(LoraKeyTest, SayWhatIsTrained) {
  const std::vector<std::string> some = {"to_k", "to_q"};
  const LoraConfig plain = training_lora(parsed("lora_rank: 8"), some);
  EXPECT_EQ(plain.rank, 8);
  EXPECT_EQ(plain.alpha, 8);
  EXPECT_EQ(plain.targets, some);
  const LoraConfig config =
      training_lora(parsed("", {"lora_rank=4", "lora_alpha=2", "lora_target_modules=to_q, conv1"}), some);
  EXPECT_EQ(config.alpha, 2);
  EXPECT_EQ(config.targets, (std::vector<std::string>{"to_q", "conv1"}));
  EXPECT_NE(message_of([&] { training_lora(parsed("lora_rank: 0"), some); }).find("lora_rank 0"), std::string::npos);
  EXPECT_NE(message_of([&] { training_lora(parsed("lora_alpha: -1"), some); }).find("lora_alpha -1"),
            std::string::npos);
}

}  // namespace
}  // namespace md
