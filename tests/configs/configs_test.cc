// Trains and samples every file of configs/ with a tiny folder instead of the model it names: two steps, few pixels,
// everything else as in the file. Also runs the commands of README.md and docs/.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

const std::string kConfigs = MD_SOURCE_DIR "/configs/";
const std::string kImages = MD_SOURCE_DIR "/tests/golden/pipelines/", kVideos = MD_SOURCE_DIR "/tests/golden/wan/",
                  kFlows = MD_SOURCE_DIR "/tests/golden/flux/", kFlows2 = MD_SOURCE_DIR "/tests/golden/flux2/distilled",
                  kZImages = MD_SOURCE_DIR "/tests/golden/zimage/base",
                  kQwenImages = MD_SOURCE_DIR "/tests/golden/qwenimage/base",
                  kQwenEdits = MD_SOURCE_DIR "/tests/golden/qwenimage_edit/plus";

/// The tiny model used instead of a published one: its folder and words that make data and media small. {}: the test's
/// folder.
struct Tiny {
  std::string folder;
  Words words;
  Dims media;  // one image [H, W, 3], or one video [F, H, W, 3]
};

const Words kImageWords = {"resolution=16", "dataset_name=", "train_data_dir={}/pictures"},
            kSizedWords = {"resolution=16", "height=16", "width=16", "dataset_name=", "train_data_dir={}/pictures"};
// The text encoder of the tiny folder has fewer layers than 27.
const Words kLayeredWords = {"resolution=16",
                             "height=16",
                             "width=16",
                             "dataset_name=",
                             "train_data_dir={}/pictures",
                             "text_encoder_out_layers=[1,2,3]"};
Words video_words(const Words& extra) {
  Words words = {"height=32", "width=32", "num_frames=5", "dataset_type=synthetic", "synthetic_num_samples=4"};
  words.insert(words.end(), extra.begin(), extra.end());
  return words;
}
const Dims kPicture = {16, 16, 3}, kVideo = {5, 32, 32, 3};
// Number of text tokens of the tiny models; an image for image-conditioned models.
const std::string kTexts = "max_sequence_length=12", kImage = "image={}/pictures/0.png";

/// Tiny models by the name in the config files. A file that names any other model fails: add a row.
const std::map<std::string, Tiny> kModels = {
    {"CompVis/stable-diffusion-v1-4", {kImages + "sd", kImageWords, kPicture}},
    {"stable-diffusion-v1-5/stable-diffusion-v1-5", {kImages + "sd", kImageWords, kPicture}},
    {"stabilityai/stable-diffusion-2-base", {kImages + "sd2", kImageWords, kPicture}},
    {"stabilityai/stable-diffusion-2-1", {kImages + "sd2", kImageWords, kPicture}},
    {"stabilityai/stable-diffusion-xl-base-1.0", {kImages + "sdxl", kImageWords, kPicture}},
    {"Wan-AI/Wan2.1-T2V-14B-Diffusers", {kVideos + "t2v", video_words({kTexts}), kVideo}},
    {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers", {kVideos + "t2v", video_words({kTexts}), kVideo}},
    {"Wan-AI/Wan2.2-T2V-A14B-Diffusers", {kVideos + "a14b", video_words({kTexts, "train_expert=low"}), kVideo}},
    {"Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", {kVideos + "i2v", video_words({kImage}), kVideo}},
    {"Wan-AI/Wan2.2-I2V-A14B-Diffusers", {kVideos + "i2v_a14b", video_words({kImage, "train_expert=low"}), kVideo}},
    // The test of TFRecords writes latents and embeddings for one of the two; here both read images.
    {"black-forest-labs/FLUX.1-dev",
     {kFlows + "dev",
      {"resolution=16", "dataset_name=", "train_data_dir={}/pictures", "dataset_type=tf", kTexts},
      kPicture}},
    {"black-forest-labs/FLUX.1-schnell",
     {kFlows + "schnell", {"resolution=16", "dataset_name=", "train_data_dir={}/pictures", kTexts}, kPicture}},
    {"black-forest-labs/FLUX.2-klein-4B", {kFlows2, kLayeredWords, kPicture}},
    {"black-forest-labs/FLUX.2-klein-9B", {kFlows2, kLayeredWords, kPicture}},
    {"Tongyi-MAI/Z-Image", {kZImages, kSizedWords, kPicture}},
    {"Tongyi-MAI/Z-Image-Turbo", {kZImages, kSizedWords, kPicture}},
    {"Qwen/Qwen-Image", {kQwenImages, kSizedWords, kPicture}},
    {"Qwen/Qwen-Image-Edit-2509",
     {kQwenEdits,
      {"resolution=16", "height=16", "width=16", "dataset_name=", "train_data_dir={}/pairs", "reference_resolution=32",
       kImage},
      kPicture}},
    // Models of this project, trained from random weights.
    {MD_SOURCE_DIR "/configs/models/emoji",
     {MD_SOURCE_DIR "/configs/models/emoji",
      {"resolution=16", "dataset_name=", "train_data_dir={}/pictures", "vae_max_train_steps=1",
       "vae_per_device_batch_size=2"},
      kPicture}},
    {MD_SOURCE_DIR "/configs/models/moving_emoji",
     {MD_SOURCE_DIR "/configs/models/moving_emoji",
      {"height=16", "width=16", "num_frames=5", "dataset_save_location={}", "max_train_samples=4",
       "vae_image_pretrain_steps=1", "vae_max_train_steps=1", "vae_per_device_batch_size=2"},
      {5, 16, 16, 3}}},
    // base_wan.yml, the base of the others.
    {"", {kVideos + "t2v", video_words({kTexts}), kVideo}},
};

/// Config files for sampling only, each with the reason.
const std::map<std::string, std::string> kNotTrained = {
    {"base_xl_lightning.yml", "a UNet that was distilled for four steps: the file names no data to go on with"},
};
/// Additional words that a file needs.
const std::map<std::string, Words> kMore = {{"base_xl_lightning.yml", {"lightning_repo={}/lightning"}}};

std::vector<std::string> files() {
  std::vector<std::string> out;
  for (const auto& f : fs::directory_iterator(kConfigs))
    if (f.path().extension() == ".yml") out.push_back(f.path().filename());
  std::ranges::sort(out);
  return out;
}

class Configs : public testing::Test {
 protected:
  Configs() {
    make_folders(t / "pictures");
    make_folders(t / "lightning");
    make_folders(t / "pairs");
    std::string pairs;
    for (int i = 0; i < 4; ++i) {
      HostArray rgb(Shape{DType::u8, {32, 32, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(41 * i + static_cast<int>(k % 96) * 5);
      write_png(t / fmt::format("pictures/{}.png", i), rgb);
      write_file_atomic(t / fmt::format("pictures/{}.txt", i), fmt::format("heart {}", i));
      fs::copy(t / fmt::format("pictures/{}.png", i), t / "pairs");
      pairs += fmt::format(R"({{"file_name": "{0}.png", "source": "0.png", "text": "heart {0}"}})"
                           "\n",
                           i);
    }
    write_file_atomic(t / "pairs/metadata.jsonl", pairs);
    fs::copy(kImages + "sdxl/unet/diffusion_pytorch_model.safetensors",
             t / "lightning/sdxl_lightning_4step_unet.safetensors");
  }
  Words placed(Words words) const {
    for (std::string& word : words)
      if (const size_t i = word.find("{}"); i != word.npos) word.replace(i, 2, t.path());
    return words;
  }
  /// The value of a key in a printed config.
  static std::string value_of(const std::string& config, const std::string& key) {
    std::smatch found;
    EXPECT_TRUE(std::regex_search(config, found, std::regex("(?:^|\n)" + key + ": ([^\n]*)\n"))) << key;
    const std::string value = found[1];
    return value == R"("")" ? "" : value;
  }
  /// Samples a config with two prompts: two media, f32 in [0, 1].
  std::vector<HostArray> generate(const std::string& config, const Words& model, const std::string& prompts) {
    std::filesystem::remove_all(t / "sampled");  // files of an earlier call would remain
    Words words = {"generate", config};
    words.insert(words.end(), model.begin(), model.end());
    const Words sampling_words = {"output_type=np", "num_inference_steps=2", "num_images_per_prompt=1",
                                  "prompt=" + prompts, "output_dir=" + (t / "sampled")};
    words.insert(words.end(), sampling_words.begin(), sampling_words.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    const std::string name = exists(t / "sampled/video.safetensors") ? "video" : "images";
    const std::string file = t / ("sampled/" + name + ".safetensors");
    if (o.status != 0 || !exists(file)) return {};
    const HostArray all = SafetensorsReader::open(file).tensors().at(name);
    std::vector<HostArray> media;
    Dims one = all.dims();
    EXPECT_EQ(one.at(0), 2);
    one.erase(one.begin());
    const auto values = all.view<float>();
    for (const float v : values) EXPECT_TRUE(v >= 0 && v <= 1) << v;
    for (size_t i = 0; i < 2; ++i)
      media.push_back(
          HostArray::of<float>({DType::f32, one}, values.subspan(i * values.size() / 2, values.size() / 2)));
    return media;
  }
  TemporaryFolder t;
};

class ShippedConfig : public Configs, public testing::WithParamInterface<std::string> {};

bool equal(const HostArray& a, const HostArray& b) { return a.to_doubles() == b.to_doubles(); }

// S0-90, S3-15
TEST_P(ShippedConfig, IsTrainedAndSampled) {
  const std::string& file = GetParam();
  const Outcome whole = maxdiffusion({"inspect", "config", kConfigs + file});
  ASSERT_EQ(whole.status, 0) << whole.err;
  const std::string named = value_of(whole.out, "pretrained_model_name_or_path");
  ASSERT_TRUE(kModels.contains(named)) << "give the model '" << named << "' of " << file << " a row in kModels";
  const Tiny& tiny = kModels.at(named);
  Words words = placed(tiny.words);
  words.insert(words.end(), {"pretrained_model_name_or_path=" + tiny.folder, "run_name=run", "output_dir=" + t.path(),
                             "xla_flags=--xla_backend_optimization_level=0"});  // halves compile time
  if (kMore.contains(file))
    for (const std::string& word : placed(kMore.at(file))) words.push_back(word);

  std::string config = kConfigs + file;
  if (!kNotTrained.contains(file)) {
    Words training = {
        "train",         config, "max_train_steps=2", "per_device_batch_size=2", "save_final_checkpoint=true",
        "sample_every=0"};
    training.insert(training.end(), words.begin(), words.end());
    const Outcome o = maxdiffusion(training);
    ASSERT_EQ(o.status, 0) << o.err;
    int steps = 0;
    std::ifstream metrics(t / "run/metrics.jsonl");
    for (std::string line; std::getline(metrics, line); ++steps) {
      const auto json = parse_json(line);
      ASSERT_TRUE(json.at("loss").is_number()) << line;
      EXPECT_TRUE(std::isfinite(json["loss"].get<double>()) && json["loss"] > 0) << line;
    }
    EXPECT_EQ(steps, 2);
    // Weights of products have the type that the file sets; weights that the model keeps in float32 stay so; all are
    // finite.
    const DType type = parse_dtype(value_of(whole.out, "weights_dtype"));
    int trained = 0;
    for (const auto& part : fs::directory_iterator(t / "run/checkpoints/2")) {
      if (!part.is_directory() || !exists(part.path() / "config.json")) continue;
      const std::string component = part.path().filename();
      const bool is_trained = component == "unet" || component.starts_with("transformer");
      for (const auto& [name, array] : SafetensorsReader::open(part.path()).tensors()) {
        const bool product = name.ends_with(".to_q.weight") || name.ends_with(".conv1.weight");
        EXPECT_TRUE(!is_trained || array.dtype() == type || (!product && array.dtype() == DType::f32)) << name;
        for (const double v : array.to_doubles()) ASSERT_TRUE(std::isfinite(v)) << component << " " << name;
      }
      trained += is_trained;
    }
    EXPECT_GE(trained, 1);
    config = t / "run/config.yml";
    words.clear();  // the run's config holds them
  }

  const std::vector<HostArray> two = generate(config, words, R"(["red heart", "blue"])");
  const std::vector<HostArray> one = generate(config, words, R"(["red heart", "red heart"])");
  ASSERT_EQ(two.size(), 2u);
  ASSERT_EQ(one.size(), 2u);
  EXPECT_EQ(two[0].dims(), tiny.media);
  EXPECT_TRUE(equal(two[0], one[0])) << "one prompt and seed give one image";
  EXPECT_FALSE(equal(two[1], one[1])) << "of the same noise, another prompt gives another image";
  EXPECT_FALSE(equal(one[0], one[1])) << "of the same prompt, other noise gives another image";
}

INSTANTIATE_TEST_SUITE_P(All, ShippedConfig, testing::ValuesIn(files()),
                         [](const auto& info) { return info.param.substr(0, info.param.find('.')); });

/// The program's commands in a page's code blocks: their words after ./run, without commands of `run` itself.
std::vector<Words> commands_of(const std::string& page) {
  std::vector<Words> out;
  static const std::regex of_run("^(bench|docs|format|fuzz|lint|package|sbom|setup|test|tune)\\b");
  std::ifstream f(MD_SOURCE_DIR "/" + page);
  bool block = false;
  for (std::string line, extra; std::getline(f, line);) {
    if (line.starts_with("```")) block = !block;
    while (line.ends_with("\\") && std::getline(f, extra)) line = line.substr(0, line.size() - 1) + extra.substr(2);
    const size_t at = line.find("./run ");
    if (!block || at == line.npos) continue;
    line = line.substr(at + 6);
    if (std::regex_search(line, of_run)) continue;
    line = line.substr(0, line.find("  "));  // the rest describes it
    Words words = {""};
    bool quoted = false;
    for (const char c : line) {
      if (c == '"')
        quoted = !quoted;
      else if (c == ' ' && !quoted)
        words.emplace_back();
      else
        words.back() += c;
    }
    out.push_back(words);
  }
  return out;
}

class DocumentedCommands : public Configs {
 protected:
  DocumentedCommands() {
    fs::copy(kImages + "lora_peft.safetensors", t / "style.safetensors");
    fs::copy(kImages + "lora_kohya.safetensors", t / "line.safetensors");
  }
  /// Replaces a command's model, data and files by test ones and adds words that make it fast. Also returns the index
  /// of its config, or the number of words.
  std::pair<Words, size_t> filled(const Words& words) {
    const auto config = static_cast<size_t>(
        std::ranges::find_if(words, [](const std::string& w) { return w.ends_with(".yml"); }) - words.begin());
    const bool has_config = config < words.size();
    const std::string file = has_config ? fs::path(words[config]).filename().string() : "";
    const bool with_lora = std::ranges::any_of(words, [](const auto& w) { return w.starts_with("lora_files="); });
    Tiny tiny = kModels.at("stabilityai/stable-diffusion-xl-base-1.0");
    if (has_config && exists(kConfigs + file) && file != "quickstart.yml" && !with_lora)
      tiny = kModels.at(
          value_of(maxdiffusion({"inspect", "config", kConfigs + file}).out, "pretrained_model_name_or_path"));
    if (std::ranges::count(words, "component=transformer") > 0) tiny = kModels.at("black-forest-labs/FLUX.1-dev");
    // Sampling needs weights, which models of configs/ lack.
    if (words[0] == "generate" && tiny.folder.starts_with(kConfigs)) tiny = kModels.at("");
    const std::string model = "pretrained_model_name_or_path=" + tiny.folder, images = t / "pictures";
    const std::map<std::string, std::string> stands = {
        {"unet_checkpoint=FILE.gguf", "unet_checkpoint=transformer.gguf"},
        {"…", model},
        {"pretrained_model_name_or_path=FOLDER", model},
        {"train_data_dir=FOLDER", "train_data_dir=" + images},
        {"train_data_dir=PICTURES", "train_data_dir=" + images},
        {"train_data_dir=PAIRS", "train_data_dir=" + (t / "pairs")},
        {"instance_data_dir=…", "instance_data_dir=" + images},
        {"controlnet_model_name_or_path=FOLDER", "controlnet_model_name_or_path=" + kImages + "controlnet"},
        {"controlnet_image=edges.png", "controlnet_image=" + images + "/0.png"},
        {"CONFIG.yml", kConfigs + "quickstart.yml"},
        {"FOLDER", words[0] == "convert" && words[2] == "FOLDER" ? t / "made" : tiny.folder},
        {"TUNED_FOLDER", t / "merged"}};
    Words out;
    for (std::string word : words) {
      if (const auto it = stands.find(word); it != stands.end()) word = it->second;
      if (word.ends_with("=…")) word = word.substr(0, word.find('=')) + (word.starts_with("ici_") ? "=1" : "=some");
      if (word.starts_with("configs/")) word = kConfigs + file;
      if (const size_t at = word.find("STEP"); at != word.npos) word.replace(at, 4, "2");  // the last of two
      if (const size_t at = word.find("=hf://"); at != word.npos)
        word.replace(at + 1, word.npos, kModels.at(word.substr(at + 6)).folder);
      // Keys of `plan` and `serve`, not of their config.
      if (word != "key=value" && !word.starts_with("fit=") && !word.starts_with("port=")) out.push_back(word);
    }
    // Configs cannot be derived from a file whose sizes are not published.
    if (words[0] == "convert" && words[1] == "model.safetensors") out.push_back("single_file_config=" + tiny.folder);
    if (!has_config) return {out, config};
    Words extra = placed(tiny.words);
    extra.insert(extra.end(), {model, "xla_flags=--xla_backend_optimization_level=0"});
    if (words[0].starts_with("train"))
      extra.insert(extra.end(), {"max_train_steps=2", "vae_max_train_steps=1", "per_device_batch_size=2",
                                 "sample_every=0", "num_class_images=2"});
    else
      extra.insert(extra.end(), {"num_inference_steps=2", "per_device_batch_size=1"});
    if (words[0] == "check") extra.emplace_back("run_name=checked");
    const auto sets = [](const char* key) {
      return [key = std::string(key) + "="](const std::string& w) { return w.starts_with(key); };
    };
    if (std::ranges::any_of(words, sets("dataset_config"))) std::erase_if(extra, sets("train_data_dir"));
    if (std::ranges::count(words, "enable_bucket=true") > 0)
      extra.insert(extra.end(), {"min_bucket_reso=8", "max_bucket_reso=32", "bucket_reso_steps=8"});
    // The command's words win, except for the number of steps.
    out.insert(out.begin() + static_cast<std::ptrdiff_t>(config) + 1, extra.begin(), extra.end());
    if (words[0].starts_with("train")) out.emplace_back("max_train_steps=2");
    return {out, config};
  }
  /// Runs a command in the test's folder.
  Outcome run(const Words& words) {
    std::string program = MD_BINARY_DIR "/maxdiffusion";
    for (const std::string& word : words) program += " '" + word + "'";
    if (words[0] == "serve")  // until it serves
      program = "{ " + program +
                " port=0 warm_up=false 2>serve.log & pid=$!; for i in $(seq 600); do grep -q 'serving on' serve.log && "
                "break; sleep 0.1; done; kill -TERM $pid; wait $pid || { cat serve.log >&2; false; }; }";
    return shell("cd " + t.path() + " && " + program);
  }
};

// Runs each page's commands to the end, with small models.
TEST_F(DocumentedCommands, OfTheReadmeAndOfFilesAndLoraRun) {
  int ran = 0;
  for (const char* page : {"README.md", "docs/convert.md", "docs/lora.md", "docs/lora_tutorial.md"})
    for (const Words& words : commands_of(page)) {
      // A file of the original program: WanNames and Video.TakesItsTransformerFromAnotherFile create such files.
      if (words.size() > 1 && words[1] == "Wan2.1_T2V.safetensors") continue;
      if (std::ranges::count(words, "run_name=mine") > 0) fs::remove_all(t / "runs/mine");
      fs::remove(t / "small.safetensors");
      if (words[0] == "convert")
        fs::remove(t / "transformer.gguf");  // docs/convert.md writes it twice, and reads it in between
      const Words command = filled(words).first;
      const Outcome o = run(command);
      EXPECT_EQ(o.status, 0) << page << ": "
                             << fmt::format("{}\n as {}\n", fmt::join(words, " "), fmt::join(command, " ")) << o.err;
      ++ran;
    }
  EXPECT_GT(ran, 20);
}

// Checks commands only up to their config, since the tests above train and sample its file: a full run takes minutes.
TEST_F(DocumentedCommands, OfTheOtherPagesAreRead) {
  int read = 0;
  for (const auto& f : fs::directory_iterator(MD_SOURCE_DIR "/docs"))
    for (const Words& words : commands_of("docs/" + f.path().filename().string())) {
      // Not run: without a config `accelerator_check` runs the whole check.
      EXPECT_EQ(maxdiffusion({"help", words[0]}).status, 0) << words[0];
      auto [command, config] = filled(words);
      if (config >= words.size() || !exists(command[config])) continue;
      command.erase(command.begin(), command.begin() + static_cast<std::ptrdiff_t>(config));
      command.insert(command.begin(), {"inspect", "config"});
      const Outcome o = run(command);
      EXPECT_EQ(o.status, 0) << f.path() << fmt::format(": {}\n", fmt::join(words, " ")) << o.err;
      ++read;
    }
  EXPECT_GT(read, 15);
}

}  // namespace
}  // namespace md
