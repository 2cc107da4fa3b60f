// Kinds of training, on a tiny Stable Diffusion folder with real images: each run does what its keys specify.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kModel = MD_SOURCE_DIR "/tests/golden/pipelines/sd";
const std::string kQuickly =
    "xla_flags=--xla_backend_optimization_level=0";  // halves compile time; this test compares keys

/// The last `count` floats of a safetensors file whose only tensor is f32.
std::vector<float> last_floats(const std::string& file, size_t count) {
  std::vector<float> out(count);
  EXPECT_GE(file.size(), 4 * count);
  if (file.size() >= 4 * count) std::memcpy(out.data(), file.data() + file.size() - 4 * count, 4 * count);
  return out;
}

class Kinds : public testing::Test {
 protected:
  Kinds() {
    make_folders(t / "pictures");
    for (int i = 0; i < 5; ++i) {
      HostArray rgb(Shape{DType::u8, {16, 16, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(41 * i + static_cast<int>(k % 48) * 5);
      write_png(t / ("pictures/" + std::to_string(i) + ".png"), rgb);
      write_file_atomic(t / ("pictures/" + std::to_string(i) + ".txt"), "heart " + std::to_string(i));
    }
  }
  Outcome train(const std::string& name, const std::vector<std::string>& extra) { return run("train", name, extra); }
  Outcome run(const std::string& command, const std::string& name, const std::vector<std::string>& extra) {
    std::vector<std::string> words = {command,
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "run_name=" + name,
                                      "output_dir=" + t.path(),
                                      "pretrained_model_name_or_path=" + kModel,
                                      "train_data_dir=" + (t / "pictures"),
                                      "resolution=16",
                                      "per_device_batch_size=2",
                                      "max_train_steps=3",
                                      "learning_rate=1e-3",
                                      "diffusion_scheduler_config={_class_name: DDIMScheduler}",
                                      kQuickly};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  std::vector<double> losses(const std::string& name) {
    std::vector<double> out;
    std::ifstream f(t / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) out.push_back(parse_json(line)["loss"]);
    return out;
  }
  /// Writes an image of `width` distinct columns, starting at column `from` of 32.
  void put_image(const std::string& path, int64_t from, int64_t width) {
    HostArray rgb(Shape{DType::u8, {16, width, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (int64_t i = 0; i < static_cast<int64_t>(v.size()); ++i) {
      const int64_t y = i / (3 * width), x = i / 3 % width, column = from + x;
      v[static_cast<size_t>(i)] = static_cast<uint8_t>(7 * column + 3 * y + 40 * (i % 3));
    }
    write_png(path, rgb);
  }
  /// Runs `generate` into a folder of this name and returns the bytes of the file it writes.
  std::string generate(const std::string& name, const std::vector<std::string>& extra,
                       const std::string& command = "generate") {
    fs::remove_all(t / name);  // files of an earlier call would remain
    std::vector<std::string> words = {command,
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "pretrained_model_name_or_path=" + kModel,
                                      "output_dir=" + (t / name),
                                      "resolution=16",
                                      "num_inference_steps=2",
                                      "num_images_per_prompt=1",
                                      "prompt=heart",
                                      "output_type=latent",
                                      kQuickly};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome generated = maxdiffusion(words);
    EXPECT_EQ(generated.status, 0) << generated.err;
    for (const char* file : {"latents.safetensors", "images.safetensors", "image_0.png"})
      if (exists(t / (name + "/" + file))) return read_file(t / (name + "/" + file));
    return "";
  }
  std::string weights(const std::string& name, const std::string& file) {
    return read_file(t / (name + "/checkpoints/3/" + file));
  }
  TemporaryFolder t;
};

// S0-93, S4-52
TEST_F(Kinds, EncodingInTheStepTrainsAsTheCacheDoes) {
  Outcome o = train("cached", {});
  ASSERT_EQ(o.status, 0) << o.err;
  o = train("uncached", {"cache_latents_text_encoder_outputs=false"});
  ASSERT_EQ(o.status, 0) << o.err;
  const std::vector<double> a = losses("cached"), b = losses("uncached");
  ASSERT_EQ(a.size(), 3u);
  ASSERT_EQ(b.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(a[i], b[i], 1e-4 * a[i]) << i;
  // Untrained weights are the model folder's files.
  EXPECT_EQ(weights("cached", "vae/diffusion_pytorch_model.safetensors"),
            read_file(kModel + "/vae/diffusion_pytorch_model.safetensors"));
}

// S4-23, S4-78, S4-100
TEST_F(Kinds, TheTextEncoderIsTrainedWithTheUNet) {
  Outcome o = train("both", {"train_text_encoder=true"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "Cannot train text encoder and cache text encoder outputs")) << o.err;
  o = train("both",
            {"train_text_encoder=true", "cache_latents_text_encoder_outputs=false", "text_encoder_learning_rate=1e-3",
             "checkpoint_every=4", "prompt=heart", "sample_every=-1", "num_inference_steps=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(weights("both", "text_encoder/model.safetensors"), read_file(kModel + "/text_encoder/model.safetensors"));
  EXPECT_TRUE(exists(t / "both/samples/step_000003.png")) << o.err;
  const std::string shown = all_files(t / "both/tensorboard");
  EXPECT_TRUE(contains(shown, "num_model_parameters") &&
              contains(shown, read_file(t / "both/samples/step_000003.png")));
  o = train("both", {"train_text_encoder=true", "cache_latents_text_encoder_outputs=false", "max_train_steps=4"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "continues from")) << o.err;
  // Without its key the run's next checkpoints would lack the trained text encoder.
  const Outcome refused = train("both", {"max_train_steps=6"});
  EXPECT_TRUE(contains(refused.err, "holds 'text_encoder', which this run does not train")) << refused.err;
  EXPECT_EQ(refused.status, 2);
  EXPECT_FALSE(exists(t / "both/checkpoints/6"));
  // The last step used the key's default, a small fraction of the rate before.
  auto moved = [&](int from, int to) {
    auto floats = [&](int step) {
      return last_floats(
          read_file(t / ("both/checkpoints/" + std::to_string(step) + "/text_encoder/model.safetensors")), 1000);
    };
    const std::vector<float> a = floats(from), b = floats(to);
    float most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
  };
  EXPECT_GT(moved(2, 3), 1e-4f);
  EXPECT_GT(moved(3, 4), 0.0f);
  EXPECT_LT(moved(3, 4), 5e-5f);

  // Samples during training use the current text encoder: here only that changes.
  o = train("shown", {"train_text_encoder=true", "cache_latents_text_encoder_outputs=false", "learning_rate=0",
                      "text_encoder_learning_rate=0.1", "prompt=heart", "sample_every=1", "num_inference_steps=2",
                      "checkpoint_every=-1"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(read_file(t / "shown/samples/step_000001.png"), read_file(t / "shown/samples/step_000002.png"));
}

TEST_F(Kinds, ATrainedAutoencoderIsNotReplacedByTheModelFolders) {
  const std::vector<std::string> keys = {"train_new_vae=true", "vae_max_train_steps=1"};
  Outcome o = train("coded", keys);
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string file = "vae/diffusion_pytorch_model.safetensors", trained = weights("coded", file);
  EXPECT_NE(trained, read_file(kModel + "/" + file));
  for (const char* command : {"check", "train"}) {
    o = run(command, "coded", {"max_train_steps=5"});
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, "holds 'vae', which this run does not train")) << o.err;
  }
  o = train("coded", {keys[0], keys[1], "max_train_steps=5"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(read_file(t / ("coded/checkpoints/5/" + file)), trained);
}

TEST_F(Kinds, ATrainedWordIsNotReplacedByAnother) {
  const std::string rate = "learning_rate=5e-3", from = "initializer_token=a";
  Outcome o = train("word", {"placeholder_token=<cat>", from, rate});
  ASSERT_EQ(o.status, 0) << o.err;
  o = train("word", {"placeholder_token=<dog>", from, rate, "max_train_steps=5"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "holds '<cat>', which this run does not train")) << o.err;
  EXPECT_FALSE(exists(t / "word/checkpoints/5"));
  o = train("word", {"placeholder_token=<cat>", from, rate, "max_train_steps=5"});
  EXPECT_EQ(o.status, 0) << o.err;
}

TEST_F(Kinds, ATextEncoderWhoseFilesHaveOtherNamesIsNotADamagedCheckpoint) {
  Outcome o = train("unet_first", {});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* command : {"check", "train"}) {
    o = run(command, "unet_first",
            {"train_text_encoder=true", "cache_latents_text_encoder_outputs=false", "max_train_steps=5"});
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, "checkpoints/3 has no 'text_encoder/")) << o.err;
    EXPECT_TRUE(contains(o.err, "which this run needs")) << o.err;
    EXPECT_FALSE(contains(o.err, "can be resumed")) << o.err;
  }
  EXPECT_TRUE(exists(t / "unet_first/checkpoints/3"));
}

TEST_F(Kinds, SamplesThatAreNotFiniteDoNotEndTraining) {
  const std::string model = t / "overflows", file = model + "/vae/diffusion_pytorch_model.safetensors";
  fs::copy(kModel, model, fs::copy_options::recursive);
  std::string bytes = read_file(file);
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof size);
  const auto part = parse_json(bytes.substr(8, size)).at("decoder.conv_out.weight").at("data_offsets");
  const float large = 3e38f;
  for (size_t at = part[0]; at < part[1].get<size_t>(); at += sizeof large)
    std::memcpy(&bytes[8 + size + at], &large, sizeof large);
  write_file_atomic(file, bytes);
  const Outcome o = train(
      "sampled", {"pretrained_model_name_or_path=" + model, "prompt=heart", "sample_every=1", "num_inference_steps=1"});
  EXPECT_TRUE(contains(o.err, "no samples of step 1: the pixels of image 1 are not finite")) << o.err;
  EXPECT_TRUE(contains(o.err, "no samples of step 2: ")) << o.err;
  EXPECT_EQ(losses("sampled").size(), 3u);
  EXPECT_TRUE(exists(t / "sampled/checkpoints/3"));
  EXPECT_EQ(o.status, 5) << o.err;  // of the samples at the end
}

TEST_F(Kinds, ATokenizerThatIsALinkToNoFileIsAnIncompleteDownload) {
  const std::string model = t / "linked", file = model + "/tokenizer/tokenizer.json";
  fs::copy(kModel, model, fs::copy_options::recursive);
  fs::remove(file);
  fs::create_symlink("../../../blobs/0123", file);
  const Outcome o = train("incomplete", {"pretrained_model_name_or_path=" + model});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err,
                       "tokenizer.json' is a link to '../../../blobs/0123', which does not exist: its download "
                       "is incomplete"))
      << o.err;
}

TEST_F(Kinds, AnErrorOfFilesSavesTheStateOfTheStepsBefore) {
  make_folders(t / "written/samples/step_000002.png");  // where a file of samples should be
  const Outcome o = train("written", {"prompt=heart", "sample_every=2", "num_inference_steps=1", "max_train_steps=9"});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "step_000002.png")) << o.err;
  EXPECT_TRUE(contains(o.err, "the state after step 2 is saved in ")) << o.err;
  EXPECT_TRUE(exists(t / "written/checkpoints/2"));
}

/// Bytes and time of every file below a folder. Of a folder only the name: testing whether one can write there changes
/// its time.
std::map<std::string, std::pair<std::string, fs::file_time_type>> files_and_times(const std::string& folder) {
  std::map<std::string, std::pair<std::string, fs::file_time_type>> found;
  for (const auto& f : fs::recursive_directory_iterator(folder))
    found[f.path()] = f.is_regular_file() ? std::pair(read_file(f.path()), f.last_write_time())
                                          : std::pair(std::string(), fs::file_time_type());
  found.erase(folder);
  return found;
}

TEST_F(Kinds, ARefusedStartChangesNothingOnDisk) {
  Outcome o = train("kept", {"train_lora=true", "ema_decay=0.5", "dataset_save_location=" + (t / "data")});
  ASSERT_EQ(o.status, 0) << o.err;
  const auto before = files_and_times(t / "kept");
  ASSERT_TRUE(before.contains(t / "kept/config.yml"));
  const std::string lora = "train_lora=true", ema = "ema_decay=0.5";
  for (const auto& [words, says, check_says] : std::vector<std::tuple<std::vector<std::string>, std::string, bool>>{
           {{lora, ema, "optimizer=sgd"}, "optimizer is 'sgd', but checkpoint ", true},
           {{ema}, "which this run does not train", true},
           {{lora}, "holds moving averages", true},
           {{lora, ema, "lora_rank=7"}, "expected ", true},
           {{lora, ema, "lora_init=" + (t / "nowhere.safetensors")}, "nowhere.safetensors", true},
           {{lora, ema, "train_data_dir=" + (t / "nowhere")}, "nowhere", true},
           {{lora, ema, "per_device_batch_size=64"}, "64", true},
           {{lora, ema, "no_such_key=1"}, "no_such_key", true}}) {
    SCOPED_TRACE(says);
    std::vector<std::string> all = words;
    all.insert(all.end(), {"dataset_save_location=" + (t / "data"), "max_train_steps=5"});
    for (const char* command : {"train", "check"}) {
      o = run(command, "kept", all);
      EXPECT_NE(o.status, 0) << command << o.err;
      EXPECT_TRUE(contains(o.err, says)) << command << o.err;
    }
    const auto after = files_and_times(t / "kept");
    for (const auto& [path, file] : after) EXPECT_TRUE(before.contains(path) && before.at(path) == file) << path;
    EXPECT_EQ(after.size(), before.size());
    o = train("new", all);
    if (o.status != 0) {
      EXPECT_FALSE(exists(t / "new"));
    }
    fs::remove_all(t / "new");
  }
  // What was refused has not harmed the run.
  o = train("kept", {lora, ema, "dataset_save_location=" + (t / "data"), "max_train_steps=4"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(exists(t / "kept/checkpoints/4"));
}

TEST_F(Kinds, DreamBoothGeneratesItsClassAndTrainsOnItsSubject) {
  const std::vector<std::string> words = {"instance_data_dir=" + (t / "pictures"), "class_data_dir=" + (t / "class"),
                                          "instance_prompt=a sks heart", "class_prompt=a heart", "num_class_images=3"};
  Outcome o = train("dream", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "5 images of the subject, 3 of its class")) << o.err;
  EXPECT_EQ(losses("dream").size(), 3u);
  o = train("again", words);  // the class images exist now
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_FALSE(contains(o.err, "drawing")) << o.err;
  EXPECT_EQ(losses("again"), losses("dream"));
  // Images added later are new: none is generated twice, and together they equal those of a single run.
  std::vector<std::string> at_once = words, extra = words;
  at_once[1] = "class_data_dir=" + (t / "class at once");
  at_once[4] = extra[4] = "num_class_images=5";
  for (const auto& [name, keys] : {std::pair{"at_once", at_once}, {"more", extra}}) {
    o = train(name, keys);
    ASSERT_EQ(o.status, 0) << o.err;
  }
  auto images = [&](const std::string& folder) {
    std::set<std::string> names;
    for (const auto& f : fs::directory_iterator(t / folder)) names.insert(f.path().filename().string());
    return names;
  };
  EXPECT_EQ(images("class").size(), 5u);
  EXPECT_EQ(images("class"), images("class at once"));
  std::vector<std::string> other = words;
  other.push_back("prior_loss_weight=0.5");
  o = train("other", other);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(losses("other"), losses("dream"));
  for (const char* word : {"max_train_samples=2", "random_flip=true", "random_crop=true"}) {
    other.back() = word;
    o = train("refused", other);
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, "DreamBooth (instance_data_dir) cannot be combined with")) << o.err;
  }
  std::vector<std::string> without = words;
  without[3] = "class_prompt=";
  o = train("without", without);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "needs class_prompt")) << o.err;
}

// S2-81, S2-83, S2-120
TEST_F(Kinds, EvaluationMeasuresTheSameTwiceAndTrainsNothing) {
  const std::vector<std::string> words = {"eval_every=2", "eval_data_dir=" + (t / "pictures"),
                                          "timesteps_list=[900,100]", "eval_max_number_of_samples_in_bucket=3"};
  Outcome o = train("plain", {});
  ASSERT_EQ(o.status, 0) << o.err;
  o = train("evaluated", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(losses("plain"), losses("evaluated"));
  EXPECT_TRUE(contains(o.err, "Mean eval loss for timestep 100: ")) << o.err;
  EXPECT_TRUE(contains(o.err, "Step 2, Final Average Eval loss: ")) << o.err;
  auto evaluations = [&](const std::string& name) {
    std::vector<nlohmann::json> out;
    std::ifstream f(t / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) out.push_back(parse_json(line));
    return out;
  };
  const auto lines = evaluations("evaluated");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_FALSE(lines[0].contains("eval_loss"));
  const double at_100 = lines[1].at("eval_loss_timestep_100"), at_900 = lines[1].at("eval_loss_timestep_900");
  EXPECT_NE(at_100, at_900);
  EXPECT_NEAR(lines[1].at("eval_loss"), (at_100 + at_900) / 2, 1e-8);  // nine digits are written

  // Without learning every evaluation has the same result, also with another batch size.
  std::vector<std::string> still = words;
  still[0] = "eval_every=1";
  still.push_back("learning_rate=0");
  o = train("still", still);
  ASSERT_EQ(o.status, 0) << o.err;
  const auto same = evaluations("still");
  EXPECT_EQ(same[0].at("eval_loss"), same[1].at("eval_loss"));
  EXPECT_EQ(same[0].at("eval_loss"), same[2].at("eval_loss"));
  std::vector<std::string> other = still;
  other.insert(other.end(), {"per_device_batch_size=4", "max_train_steps=1"});
  ASSERT_EQ(train("other", other).status, 0);
  EXPECT_NEAR(evaluations("other")[0].at("eval_loss"), same[0].at("eval_loss"), 1e-6);
  EXPECT_TRUE(exists(t / "still/eval_loss.png"));
  other[3] = "eval_max_number_of_samples_in_bucket=100";  // all samples, not the first three
  ASSERT_EQ(train("all", other).status, 0);
  EXPECT_NE(evaluations("all")[0].at("eval_loss"), evaluations("other")[0].at("eval_loss"));

  // The result is the same with averaged LoRA matrices that are still zero, with float32 averages of bfloat16 weights,
  // with the training loss's SNR weights, which do not apply here, and with a text encoder in the step.
  for (const std::vector<std::string>& kind :
       {std::vector<std::string>{"train_lora=true", "ema_decay=0.9"},
        {"weights_dtype=bfloat16", "ema_decay=0.9"},
        {"snr_gamma=1"},
        {"train_text_encoder=true", "cache_latents_text_encoder_outputs=false", "text_encoder_learning_rate=0"}}) {
    std::vector<std::string> extra = still;
    extra.insert(extra.end(), kind.begin(), kind.end());
    o = train(kind[0], extra);
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_NEAR(evaluations(kind[0])[2].at("eval_loss"), same[0].at("eval_loss"), 1e-4) << kind[0];
  }

  still[1] = "eval_data_dir=";
  o = train("without", still);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "eval_every needs eval_data_dir")) << o.err;
}

// S2-88…90, S4-75…77
TEST_F(Kinds, ProfileHoldsItsStepsForTensorBoardAndPerfetto) {
  const std::vector<std::string> words = {"enable_profiler=true", "skip_first_n_steps_for_profiler=1",
                                          "profiler_steps=1", "plugin=" MD_BINARY_DIR "/test_plugins/profiling.so"};
  Outcome o = train("profiled", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "profile of steps 2 to 2: ")) << o.err;
  std::string space, trace;
  for (const auto& f : fs::recursive_directory_iterator(t / "profiled/tensorboard/plugins/profile")) {
    const std::string name = f.path().string();
    if (name.ends_with(".xplane.pb")) space = read_file(name);
    if (name.ends_with(".trace.json.gz")) trace = shell("gzip -dc '" + name + "'").out;
  }
  for (const char* part : {"/host:CPU", "convolution", "attention gradient", "/device:TEST0"})
    EXPECT_TRUE(contains(space, part)) << part;
  std::vector<int> steps;
  bool kernels = false;
  const auto recorded = parse_json(trace);
  for (const auto& e : recorded.at("traceEvents")) {
    if (e.at("name") == "train") steps.push_back(e.at("args").at("step_num"));
    kernels |= e.at("name") == "adamw" && e.at("dur") > 0;
  }
  EXPECT_EQ(steps, std::vector<int>{1});
  EXPECT_TRUE(kernels);

  std::vector<std::string> none = words;
  none[2] = "profiler_steps=0";
  o = train("none", none);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "no step is recorded")) << o.err;
}

// S4-78
TEST_F(Kinds, LoraIsTrainedSavedResumedAndSampled) {
  const std::vector<std::string> lora = {"train_lora=true", "lora_rank=2", "lora_alpha=1", "checkpoint_every=2"};
  Outcome o = train("lora", lora);
  ASSERT_EQ(o.status, 0) << o.err;
  std::smatch counts;  // of all parameters, and of the LoRA matrices
  ASSERT_TRUE(
      std::regex_search(o.err, counts, std::regex(R"(: (\d+) parameters in \d+ arrays, (\d+) of them trained)")));
  EXPECT_LT(std::stoll(counts[2]), std::stoll(counts[1]) / 2);
  // The model is the folder's file; the LoRA matrices are saved next to it.
  EXPECT_EQ(weights("lora", "unet/diffusion_pytorch_model.safetensors"),
            read_file(kModel + "/unet/diffusion_pytorch_model.safetensors"));
  for (const char* file : {"pytorch_lora_weights.safetensors", "lora_kohya.safetensors"})
    EXPECT_TRUE(exists(t / ("lora/checkpoints/3/" + std::string(file)))) << file;

  // After a kill at step two, the same command yields the same LoRA matrices.
  fs::remove_all(t / "lora/checkpoints/3");
  const std::string before = read_file(t / "lora/checkpoints/2/pytorch_lora_weights.safetensors");
  o = train("lora", lora);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "continues from")) << o.err;
  EXPECT_NE(weights("lora", "pytorch_lora_weights.safetensors"), before);
  Outcome whole = train("whole", lora);
  ASSERT_EQ(whole.status, 0) << whole.err;
  EXPECT_EQ(weights("whole", "pytorch_lora_weights.safetensors"), weights("lora", "pytorch_lora_weights.safetensors"));

  const std::string checkpoint = t / "lora/checkpoints/3";
  const std::string plain = generate("plain", {}),
                    from_checkpoint = generate("own", {"pretrained_model_name_or_path=" + checkpoint});
  EXPECT_NE(plain, from_checkpoint);
  EXPECT_EQ(generate("peft", {"lora_files=" + checkpoint}), from_checkpoint);
  EXPECT_EQ(generate("kohya", {"lora_files=" + checkpoint + "/lora_kohya.safetensors"}), from_checkpoint);
  EXPECT_EQ(generate("none", {"lora_files=" + checkpoint, "lora_scales=0"}), plain);

  // Samples during training use the current LoRA matrices.
  const std::string sampler = "diffusion_scheduler_config={_class_name: DDIMScheduler}", png = "output_type=png";
  std::vector<std::string> shown = lora;
  shown.insert(shown.end(), {"learning_rate=0.1", "eval_every=3", "eval_data_dir=" + (t / "pictures"),
                             "timesteps_list=[500]", "enable_generate_video_for_eval=true", "prompt=heart",
                             "num_inference_steps=2", "num_images_per_prompt=1", png});
  o = train("shown", shown);
  ASSERT_EQ(o.status, 0) << o.err;
  generate("png_plain", {sampler, png});
  generate("png_own", {sampler, png, "pretrained_model_name_or_path=" + (t / "shown/checkpoints/3")});
  HostArray sampled;
  for (const auto& f : fs::directory_iterator(t / "shown/samples"))
    if (f.path().filename().string().starts_with("3-train_steps-")) sampled = decode_image(f.path());
  ASSERT_TRUE(sampled);
  auto largest_difference = [&](const std::string& folder) {
    const HostArray other = decode_image(t / (folder + "/image_0.png"));
    EXPECT_EQ(other.dims(), sampled.dims());
    const auto a = other.view<uint8_t>(), b = sampled.view<uint8_t>();
    int most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
  };
  EXPECT_GT(largest_difference("png_plain"), 10);
  EXPECT_LE(largest_difference("png_own"), 1);  // rounding error

  // The same run without its key is refused: its checkpoints would lack the matrices, and older ones would be deleted.
  const std::string trained = weights("lora", "pytorch_lora_weights.safetensors");
  o = train("lora", {"max_train_steps=9", "checkpoint_every=1"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "which this run does not train") && contains(o.err, "train_lora")) << o.err;
  EXPECT_EQ(weights("lora", "pytorch_lora_weights.safetensors"), trained);
  EXPECT_FALSE(exists(t / "lora/checkpoints/4"));

  o = train("init", {"train_lora=true", "lora_rank=2", "lora_alpha=1",
                     "lora_init=" + checkpoint + "/pytorch_lora_weights.safetensors"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(losses("init"), losses("whole"));
  o = train("refused", {"lora_files=" + checkpoint});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "lora_init")) << o.err;
}

class TrainedAdapters : public Kinds, public testing::WithParamInterface<const char*> {};

TEST_P(TrainedAdapters, AreResumedToTheBitSampledMergedAndTheSameOnEightDevices) {
  const std::string kind = GetParam();
  std::vector<std::string> words = {"train_lora=true", "adapter=" + kind, "lora_rank=2", "checkpoint_every=2"};
  if (kind == "ia3") words.emplace_back("feedforward_modules=to_out.0");
  Outcome o = train("run", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(weights("run", "unet/diffusion_pytorch_model.safetensors"),
            read_file(kModel + "/unet/diffusion_pytorch_model.safetensors"));
  const std::string file = "lora_kohya.safetensors", trained = weights("run", file);
  EXPECT_EQ(exists(t / "run/checkpoints/3/pytorch_lora_weights.safetensors"), kind == "dora" || kind == "lokr");
  EXPECT_EQ(exists(t / "run/checkpoints/3/peft/unet/adapter_config.json"),
            kind == "loha" || kind == "lokr" || kind == "ia3");

  // Killed after two steps, the same command ends with the same values.
  fs::remove_all(t / "run/checkpoints/3");
  EXPECT_NE(read_file(t / ("run/checkpoints/2/" + file)), trained);
  o = train("run", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "continues from")) << o.err;
  EXPECT_EQ(weights("run", file), trained);

  const std::string checkpoint = t / "run/checkpoints/3", plain = generate("plain", {}),
                    direct = generate("own", {"pretrained_model_name_or_path=" + checkpoint});
  EXPECT_NE(direct, plain);
  EXPECT_EQ(generate("kohya", {"lora_files=" + checkpoint + "/" + file}), direct);
  EXPECT_EQ(generate("none", {"lora_files=" + checkpoint + "/" + file, "lora_scales=0"}), plain);
  o = maxdiffusion({"lora", "merge", kModel, t / "merged", "lora_files=" + checkpoint + "/" + file});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(generate("from_merged", {"pretrained_model_name_or_path=" + (t / "merged")}), plain);  // rounded to bf16
  o = maxdiffusion({"lora", "convert", kModel, checkpoint + "/" + file, t / "comfyui.safetensors", "layout=comfyui"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(generate("comfyui", {"lora_files=" + (t / "comfyui.safetensors")}), direct);
  EXPECT_EQ(maxdiffusion({"lora", "info", checkpoint + "/" + file}).status, 0);
  const Outcome resized = maxdiffusion({"lora", "resize", checkpoint + "/" + file, t / "small.safetensors", "rank=1"});
  EXPECT_NE(resized.status, 0);
  EXPECT_TRUE(contains(resized.err, kind == "full" ? "holds no pairs of matrices" : "expected only pairs of matrices"))
      << resized.err;

  std::vector<std::string> mesh = words;
  mesh.insert(mesh.end(), {"cpu_device_count=8", "ici_data_parallelism=2", "ici_fsdp_parallelism=2",
                           "ici_tensor_parallelism=2", "per_device_batch_size=0.25"});
  o = train("mesh", mesh);
  ASSERT_EQ(o.status, 0) << o.err;
  const std::vector<double> one = losses("run"), eight = losses("mesh");
  ASSERT_EQ(eight.size(), 3U);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(eight[i], one[one.size() - 3 + i], 1e-5 * one[one.size() - 3 + i]);

  // Over weights in few bits, whose numbers are a percent off.
  std::vector<std::string> few = words;
  few.insert(few.end(), {"base_weights_dtype=int8"});
  o = train("few", few);
  ASSERT_EQ(o.status, 0) << o.err;
  const std::vector<double> losses_of_few = losses("few");
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NE(losses_of_few[i], eight[i]);
    EXPECT_NEAR(losses_of_few[i], eight[i], 0.02 * eight[i]);
  }

  // With each kind of dropout that it has, from the seed.
  std::vector<std::string> dropped = words;
  dropped.insert(dropped.end(), {"module_dropout=0.5", "learning_rate=0.1"});
  if (kind != "ia3") dropped.insert(dropped.end(), {"lora_dropout=0.3", "rank_dropout=0.3"});
  ASSERT_EQ(train("dropped", dropped).status, 0);
  ASSERT_EQ(train("again", dropped).status, 0);
  EXPECT_EQ(losses("dropped"), losses("again"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, TrainedAdapters, testing::Values("dora", "loha", "lokr", "ia3", "full"),
                         [](const auto& of) { return std::string(of.param); });

// S2-105, S2-106, S2-110, S4-95, S4-97
TEST_F(Kinds, QuantizedModelsAreTrainedAndSampled) {
  const std::vector<std::string> lora = {"train_lora=true", "lora_rank=2", "lora_alpha=1", "checkpoint_every=2"};
  auto int8 = [](std::vector<std::string> words) {
    words.insert(words.end(), {"use_qwix_quantization=true", "quantization=int8"});
    return words;
  };
  ASSERT_EQ(train("plain", lora).status, 0);
  const Outcome o = train("int8", int8(lora));
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "layers of unet")) << o.err;
  const std::vector<double> plain = losses("plain"), quantized = losses("int8");
  ASSERT_EQ(quantized.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {  // a product has an error of about one percent, a mean square of products less
    EXPECT_NE(quantized[i], plain[i]);
    EXPECT_NEAR(quantized[i], plain[i], 0.01 * plain[i]);
  }
  EXPECT_EQ(weights("int8", "unet/diffusion_pytorch_model.safetensors"),
            read_file(kModel + "/unet/diffusion_pytorch_model.safetensors"));

  // LoRA matrices are merged first. Their scale is large here, so that a missing merge would show.
  const std::vector<std::string> merged = {"lora_files=" + (t / "plain/checkpoints/3"), "lora_scales=300"};
  const std::string wide = generate("wide", merged), narrow = generate("narrow", int8(merged)),
                    none = generate("none", int8({}));
  double error = 0, effect = 0;
  const std::vector<float> a = last_floats(wide, 16), b = last_floats(narrow, 16), c = last_floats(none, 16);
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(b[i] - a[i], 2);
    effect += std::pow(c[i] - a[i], 2);
  }
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.05 * effect);

  std::vector<std::string> nowhere = int8(lora);
  nowhere.push_back("qwix_module_path=blocks.*");
  const Outcome refused = train("nowhere", nowhere);
  EXPECT_EQ(refused.status, 2);
  EXPECT_TRUE(contains(refused.err, "qwix_module_path 'blocks.*' matches none of")) << refused.err;
  EXPECT_TRUE(contains(refused.err, "such as time_embedding.linear_1, down_blocks.")) << refused.err;
}

// S2-46, S2-47, S2-52, S2-53, S4-48, S4-49, S4-51, S4-54, S4-55
TEST_F(Kinds, DataOfEveryKindIsTrainedOn) {
  const std::string files = MD_SOURCE_DIR "/tests/golden/data/files/";
  for (const auto& [name, words] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"parquet",
            {"train_data_dir=", "hf_train_files=" + files + "plain.parquet", "image_column=picture",
             "caption_column=captions"}},
           {"saved", {"train_data_dir=", "dataset_type=tf", "dataset_name=" + files + "saved"}},
           {"tar", {"train_data_dir=" + files + "shard-000000.tar", "cache_latents_text_encoder_outputs=false"}},
           {"synthetic", {"train_data_dir=", "dataset_type=synthetic", "synthetic_num_samples=4"}}}) {
    const Outcome o = train(name, words);
    EXPECT_EQ(o.status, 0) << name << "\n" << o.err;
    EXPECT_EQ(losses(name).size(), 3u) << name;
  }
  const Outcome o =
      train("flipped", {"dataset_type=tfrecord", "train_data_dir=" + files + "laion", "random_flip=true"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "cannot be combined with random_flip: records hold latents")) << o.err;
}

TEST_F(Kinds, TfrecordsHoldImagesWhereAKeySaysSo) {
  const std::string images = "train_data_dir=" MD_SOURCE_DIR "/tests/golden/data/files/pictures.tfrecord";
  Outcome o = train("cached", {"dataset_type=tfrecord", images, "load_tfrecord_cached=false"});
  ASSERT_EQ(o.status, 0) << o.err;
  o = train("step", {"dataset_type=tfrecord", images, "cache_latents_text_encoder_outputs=false"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(losses("cached").size(), 3u);
  EXPECT_EQ(train("encoded", {"dataset_type=tfrecord", images}).status, 4);
}

// S2-60, S2-63
TEST_F(Kinds, SyntheticSamplesHaveTheSizesOfTheirKeys) {
  const std::vector<std::string> keys = {"train_data_dir=",
                                         "dataset_type=synthetic",
                                         "synthetic_num_samples=null",
                                         "synthetic_override_height=32",
                                         "synthetic_override_max_sequence_length=5",
                                         "synthetic_override_num_channels_latents=4"};
  Outcome o = train("made", keys);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "StableDiffusionPipeline Synthetic Data Iterator Configuration:")) << o.err;
  EXPECT_TRUE(contains(o.err, "samples: without end")) << o.err;
  EXPECT_TRUE(contains(o.err, "height 32, width 16, frames 1")) << o.err;
  EXPECT_TRUE(contains(o.err, "  prompt_embeds: f32[2,5,")) << o.err;
  const std::vector<double> whole = losses("made");
  ASSERT_EQ(whole.size(), 3u);
  std::vector<std::string> part = keys;
  part.push_back("max_train_steps=2");
  ASSERT_EQ(train("parts", part).status, 0);
  ASSERT_EQ(train("parts", keys).status, 0);  // continues the stream of samples
  EXPECT_EQ(losses("parts"), whole);

  part = keys;
  part.back() = "synthetic_override_num_channels_latents=16";
  o = train("refused", part);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "synthetic_override_num_channels_latents is 16; expected 4, this model's")) << o.err;
  part.back() = "max_train_steps=0";
  o = train("endless", part);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "max_train_steps is 0; expected more than 0")) << o.err;
}

// S2-75
TEST_F(Kinds, CheckpointsAreWhereTheirKeySaysResumedAndSampled) {
  const std::string where = "checkpoint_dir=" + (t / "elsewhere");
  {
    make_folders(t / "elsewhere");
    const int lock = ::open((t / "elsewhere/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    ASSERT_EQ(::flock(lock, LOCK_EX), 0);  // as a run of another name holds it
    const Outcome o = train("kept", {where});
    EXPECT_EQ(o.status, 4) << o.err;
    EXPECT_TRUE(contains(o.err, "elsewhere' is in use by another process")) << o.err;
    EXPECT_TRUE(contains(o.err, "try: another checkpoint_dir")) << o.err;
    ::close(lock);
  }
  ASSERT_EQ(train("kept", {}).status, 0);
  ASSERT_EQ(train("moved", {where, "max_train_steps=2"}).status, 0);
  ASSERT_EQ(train("moved", {where}).status, 0);
  EXPECT_EQ(losses("moved"), losses("kept"));
  EXPECT_FALSE(exists(t / "moved/checkpoints"));
  const std::string unet = "/3/unet/diffusion_pytorch_model.safetensors";
  EXPECT_EQ(read_file(t / ("elsewhere" + unet)), read_file(t / ("kept/checkpoints" + unet)));

  const Outcome o = maxdiffusion({"generate", t / "moved/config.yml", "num_inference_steps=2", "prompt=heart",
                                  "num_images_per_prompt=1", "output_type=latent", "diffusion_scheduler_config={}"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(read_file(t / "moved/latents.safetensors"),
            generate("folder", {"pretrained_model_name_or_path=" + (t / "elsewhere/3")}));
}

TEST_F(Kinds, FrozenModelsComputeInTheTypesOfTheirKeys) {
  const std::vector<std::string> np = {"output_type=np"};
  auto images = [&](const std::string& name, const std::vector<std::string>& extra) {
    std::vector<std::string> words = np;
    words.insert(words.end(), extra.begin(), extra.end());
    return last_floats(generate(name, words), 768);
  };
  const std::vector<float> plain = images("f32", {});
  // The folder's weights are exact in bf16.
  EXPECT_EQ(images("stored", {"vae_weights_dtype=bfloat16"}), plain);
  for (const char* word : {"text_encoder_dtype=bfloat16", "vae_dtype=bfloat16"}) {
    const std::vector<float> found = images(std::string(word).substr(0, 7), {word});
    double worst = 0;
    for (size_t i = 0; i < plain.size(); ++i) worst = std::max<double>(worst, std::fabs(found[i] - plain[i]));
    fmt::print("  {}: images {:.2g}\n", word, worst);
    EXPECT_GT(worst, 0) << word;
    // For values up to 1: four standard deviations of 16 layers, each of which rounds by 2^-9; errors add in
    // quadrature.
    EXPECT_LT(worst, 4 * std::sqrt(16) / 512) << word;
  }
  // In training, both with encoding beforehand and in the step.
  for (const char* cache : {"true", "false"}) {
    const std::string run = std::string("cache_") + cache,
                      key = std::string("cache_latents_text_encoder_outputs=") + cache,
                      place = "dataset_save_location=" + (t / "made");  // shared: the types tell them apart
    ASSERT_EQ(train(run, {key, place}).status, 0);
    const Outcome o = train(run + "_narrow", {key, place, "text_encoder_dtype=bfloat16", "vae_dtype=bfloat16",
                                              "vae_weights_dtype=bfloat16"});
    ASSERT_EQ(o.status, 0) << o.err;
    const std::vector<double> a = losses(run), b = losses(run + "_narrow");
    EXPECT_NE(a, b);
    // The mean of many squares, each from latents and embeddings with a rounding error of 2^-9.
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(a[i], b[i], 2 * a[i] / 512) << i;
  }
}

TEST_F(Kinds, ImagesHoldTheirSamplingSettings) {
  const std::string png =
      generate("told", {"output_type=png", "negative_prompt=grey", "sample_seed=7", "guidance_scale=3"});
  EXPECT_TRUE(contains(png, "heart\nNegative prompt: grey\nSteps: 2, Sampler: ")) << png.substr(0, 400);
  EXPECT_TRUE(contains(png, ", CFG scale: 3, Seed: 7, Size: 16x16, Model: ")) << png.substr(0, 400);
}

// S2-9, S2-10
TEST_F(Kinds, AFolderIsWhatItsKeysSayItIs) {
  for (const char* word : {"model_name=wan2.1", "model_type=I2V"}) {
    const Outcome o = train("other", {word});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, kModel + " is a StableDiffusionPipeline; expected none")) << o.err;
  }
}

// S4-57, S4-58
TEST_F(Kinds, ImagesArePreparedAsTheirKeysSay) {
  for (const char* folder : {"wide", "middle"}) make_folders(t / folder);
  put_image(t / "wide/0.png", 0, 32);
  put_image(t / "middle/0.png", 8, 16);
  const std::string one = "per_device_batch_size=1";
  ASSERT_EQ(train("cut", {"train_data_dir=" + (t / "wide"), "center_crop=true", one}).status, 0);
  ASSERT_EQ(train("ready", {"train_data_dir=" + (t / "middle"), one}).status, 0);
  ASSERT_EQ(train("squeezed", {"train_data_dir=" + (t / "wide"), one}).status, 0);
  EXPECT_EQ(losses("cut"), losses("ready"));
  EXPECT_NE(losses("squeezed"), losses("ready"));
  // The random choice of mirrored images does not depend on where they are encoded.
  put_image(t / "wide/1.png", 3, 20);
  ASSERT_EQ(train("flipped", {"train_data_dir=" + (t / "wide"), "random_flip=true"}).status, 0);
  ASSERT_EQ(train("flipped_in_step",
                  {"train_data_dir=" + (t / "wide"), "random_flip=true", "cache_latents_text_encoder_outputs=false"})
                .status,
            0);
  const std::vector<double> cached = losses("flipped"), in_step = losses("flipped_in_step");
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(cached.at(i), in_step.at(i), 1e-4 * cached[i]) << i;
  ASSERT_EQ(train("never_flipped", {"train_data_dir=" + (t / "wide")}).status, 0);
  EXPECT_NE(losses("never_flipped"), cached);
  const Outcome o = train("anywhere", {"train_data_dir=" + (t / "wide"), "random_crop=true"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "random_crop")) << o.err;
}

// S2-26, S2-27, S4-26…28
TEST_F(Kinds, EpochsCountWhereStepsDoNot) {
  const Outcome o = train("epochs", {"max_train_steps=0", "num_train_epochs=2", "random_flip=true"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(losses("epochs").size(), 5u);  // twice five images, two at a time
  // An epoch has two and a half batches; max_train_steps sets three steps.
  ASSERT_EQ(train("steps", {"num_train_epochs=1"}).status, 0);
  EXPECT_EQ(losses("steps").size(), 3u);
  EXPECT_EQ(train("none", {"max_train_steps=0", "num_train_epochs=0"}).status, 2);
  EXPECT_EQ(train("some", {"max_train_steps=0", "max_train_samples=4"}).status, 0);
  EXPECT_EQ(losses("some").size(), 2u);
}

// S4-9, S4-10, S4-31, S4-80, S4-84, S4-85, S4-91
TEST_F(Kinds, ImagesFollowTheirKeys) {
  ASSERT_EQ(train("tuned", {}).status, 0);
  const std::string tuned = t / "tuned/checkpoints/3", plain = generate("plain", {}),
                    expected = generate("tuned_folder", {"pretrained_model_name_or_path=" + tuned});
  EXPECT_NE(plain, expected);
  EXPECT_EQ(generate("checkpoint", {"unet_checkpoint=" + tuned}), expected);
  EXPECT_EQ(generate("lightning",
                     {"lightning_repo=" + tuned + "/unet", "lightning_ckpt=diffusion_pytorch_model.safetensors"}),
            expected);
  // With a run's config its newest checkpoint is sampled, unless the command line names a model.
  auto draw_with_run = [&](const std::vector<std::string>& extra) {
    fs::remove_all(t / "with_run");
    std::vector<std::string> words = {"generate",
                                      t / "tuned/config.yml",
                                      "num_inference_steps=2",
                                      "prompt=heart",
                                      "num_images_per_prompt=1",
                                      "output_type=latent",
                                      "output_dir=" + (t / "with_run"),
                                      "diffusion_scheduler_config={}"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(words);
    return o.status == 0 ? read_file(t / "with_run/latents.safetensors") : o.err;
  };
  EXPECT_EQ(draw_with_run({}), expected);
  EXPECT_EQ(draw_with_run({"pretrained_model_name_or_path=" + kModel}), plain);
  EXPECT_TRUE(contains(draw_with_run({"pretrained_model_name_or_path=" + (t / "nowhere")}), "nowhere"));
  EXPECT_NE(generate("seed", {"seed=5"}), plain);
  EXPECT_EQ(generate("sample_seed", {"sample_seed=5"}), generate("seed", {"seed=5"}));
  EXPECT_NE(generate("unguided", {"do_classifier_free_guidance=false"}), plain);
  EXPECT_EQ(generate("unguided", {"do_classifier_free_guidance=false"}), generate("one", {"guidance_scale=1"}));
  EXPECT_NE(generate("prompt", {"prompt=circle"}), plain);

  // Decodes image by image with a decoder of batch 1 and gets the same images.
  auto programs = [&] { return std::distance(fs::directory_iterator(t / "programs"), {}); };
  const std::vector<std::string> two = {"num_images_per_prompt=2", "per_device_batch_size=2", "output_type=np",
                                        "jax_cache_dir=" + (t / "programs")};
  std::vector<std::string> sliced = two;
  sliced.push_back("vae_slicing=true");
  const std::vector<float> together = last_floats(generate("together", two), 1536);
  const auto before = programs();
  const std::vector<float> alone = last_floats(generate("sliced", sliced), 1536);
  EXPECT_EQ(programs(), before + 1);
  for (size_t i = 0; i < alone.size(); ++i) ASSERT_NEAR(alone[i], together[i], 1e-5) << i;
  EXPECT_EQ(generate("png", {"output_type=png"}).substr(1, 3), "PNG");

  put_image(t / "control.png", 0, 16);
  const std::vector<std::string> control = {"controlnet_model_name_or_path=" MD_SOURCE_DIR
                                            "/tests/golden/pipelines/controlnet",
                                            "controlnet_image=" + (t / "control.png")};
  std::vector<std::string> canny = control, sobel = control;
  canny.push_back("controlnet_preprocessor=canny");
  sobel.push_back("controlnet_preprocessor=sobel");
  EXPECT_NE(generate("control", control, "generate_controlnet"), plain);
  EXPECT_NE(generate("canny", canny, "generate_controlnet"), generate("control", control, "generate_controlnet"));
  sobel.insert(sobel.begin(), {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                               "pretrained_model_name_or_path=" + kModel, "prompt=heart"});
  const Outcome o = maxdiffusion(sobel);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "controlnet_preprocessor is `sobel`, expected one of: none, canny")) << o.err;

  // An image may have a public web address, but not an address of this machine or its network.
  const Outcome local = maxdiffusion({"generate_controlnet", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "pretrained_model_name_or_path=" + kModel, "prompt=heart", control[0],
                                      "output_dir=" + t.path(), "controlnet_image=http://127.0.0.1:1/control.png"});
  EXPECT_EQ(local.status, 4) << local.err;
  EXPECT_TRUE(contains(local.err, "image 'http://127.0.0.1:1/control.png': an address of this machine")) << local.err;

  ASSERT_EQ(train("from", {"unet_checkpoint=" + tuned}).status, 0);
  ASSERT_EQ(train("from_folder", {"pretrained_model_name_or_path=" + tuned}).status, 0);
  EXPECT_EQ(losses("from"), losses("from_folder"));
  EXPECT_NE(losses("from"), losses("tuned"));
}

// S4-43, S4-45, S4-46, P-2
TEST_F(Kinds, SavedWeightsAndSamplesAreThoseOfTheTrainedModel) {
  const std::vector<std::string> keys = {
      "prediction_type=v_prediction", "diffusion_scheduler_config={rescale_zero_terminal_snr: true, beta_end: 0.02}"};
  ASSERT_EQ(train("v", keys).status, 0);
  const std::string folder = t / "v/checkpoints/3";
  const auto saved = parse_json(read_file(folder + "/scheduler/scheduler_config.json"));
  EXPECT_EQ(saved.at("_class_name"), "PNDMScheduler");
  EXPECT_EQ(saved.at("prediction_type"), "v_prediction");
  EXPECT_EQ(saved.at("rescale_betas_zero_snr"), true);
  EXPECT_EQ(saved.at("beta_end"), 0.02);
  const std::string model = "pretrained_model_name_or_path=" + folder, ddim = "_class_name: DDIMScheduler",
                    generated = generate("v_folder", {model, "diffusion_scheduler_config={" + ddim + "}"});
  EXPECT_EQ(generate("v_keys",
                     {model, keys[0],
                      "diffusion_scheduler_config={" + ddim + ", rescale_zero_terminal_snr: true, beta_end: 0.02}"}),
            generated);
  EXPECT_NE(generate("epsilon", {model, "prediction_type=epsilon", "diffusion_scheduler_config={" + ddim + "}"}),
            generated);
}

// S2-31, S4-31, S4-38, S4-59
TEST_F(Kinds, NoiseAndTimestepsFollowTheirKeys) {
  ASSERT_EQ(train("plain", {}).status, 0);
  const std::vector<double> plain = losses("plain");
  ASSERT_EQ(train("again", {"seed=0"}).status, 0);
  EXPECT_EQ(losses("again"), plain);
  for (const std::string word :
       {"noise_offset=0.5", "seed=1", "timestep_bias={strategy: later, multiplier: 50, portion: 0.1}",
        "reuse_example_batch=true", "enable_data_shuffling=false"}) {
    const Outcome o = train("varied", {word, "run_name=varied_" + word.substr(0, 5)});
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_NE(losses("varied_" + word.substr(0, 5)), plain) << word;
  }
  EXPECT_EQ(losses("varied_reuse")[0], plain[0]);
  // Each step uses new noise and timesteps: with one batch and a fixed model the losses still differ.
  ASSERT_EQ(train("still", {"reuse_example_batch=true", "learning_rate=0"}).status, 0);
  const std::vector<double> still = losses("still");
  EXPECT_EQ(std::set<double>(still.begin(), still.end()).size(), 3u);
  const Outcome o = train("bad", {"timestep_bias={strategy: sometimes}"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "none, earlier, later, range")) << o.err;
}

}  // namespace
}  // namespace md
