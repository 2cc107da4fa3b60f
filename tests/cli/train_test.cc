// Whole runs of the real program on a few real images, with a model that compiles in seconds: what it writes, that it
// resumes to the bit after kill -9, and that damaged files do not destroy older checkpoints.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// The folder shared by all tests of this file: images and model.
struct Shared {
  TemporaryFolder folder;
  std::string images = folder / "pictures", model = folder / "model";

  Shared() {
    write_shades(images, 20);
    write_tiny_model(model);
  }
};

Shared& shared() {
  static Shared s;
  return s;
}

/// Command line of a run named `name`; later words win.
std::vector<std::string> words(const std::string& name, const std::vector<std::string>& extra = {}) {
  Shared& s = shared();
  std::vector<std::string> w = {"train",
                                MD_SOURCE_DIR "/configs/quickstart.yml",
                                "output_dir=" + (s.folder / "runs"),
                                "run_name=" + name,
                                "pretrained_model_name_or_path=" + s.model,
                                "dataset_name=",
                                "train_data_dir=" + s.images,
                                "dataset_save_location=" + (s.folder / "data"),
                                "resolution=16",
                                "vae_max_train_steps=3",
                                "vae_per_device_batch_size=3",
                                "max_train_steps=6",
                                "learning_rate_schedule_steps=100",
                                "optimizer=adamw",
                                "optimizer_args=[]",
                                "per_device_batch_size=4",
                                "checkpoint_every=8",
                                "num_inference_steps=3",
                                R"(prompt=["shade number 1", "shade number 2"])"};
  w.insert(w.end(), extra.begin(), extra.end());
  return w;
}

std::string run_folder(const std::string& name) { return shared().folder / ("runs/" + name); }

int64_t lines(const std::string& path) {
  const std::string text = read_file(path);
  return std::count(text.begin(), text.end(), '\n');
}

// S0-33, S0-94, S2-51, S2-114, S2-115, S3-12, S4-1, S4-6, S4-8, S4-16, S4-53, S4-78, S4-98, S4-99, S4-103
TEST(Train, WritesEverythingARunPromises) {
  const std::string copies = shared().folder / "copies", timing = shared().folder / "timing.txt",
                    lines_file = shared().folder / "lines.jsonl";
  const std::vector<std::string> whole = words(
      "whole", {"sample_every=4", "gcs_metrics=true", "log_period=4", "save_config_to_gcs=true",
                "base_output_directory=" + copies, "timing_metrics_file=" + timing, "metrics_file=" + lines_file});
  Outcome o = maxdiffusion(whole, "LIBTPU_INIT_ARGS=");
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string run = run_folder("whole");
  EXPECT_EQ(read_file(copies + "/whole/config.yml"), read_file(run + "/config.yml"));
  EXPECT_TRUE(contains(read_file(timing), "Finished: training - Duration: ")) << read_file(timing);
  EXPECT_EQ(lines(lines_file), 6);
  EXPECT_FALSE(fs::is_empty(shared().folder / "data/cache"));
  EXPECT_EQ(lines(run + "/vae/metrics.jsonl"), 3);
  EXPECT_TRUE(contains(o.err, run + "/samples/step_000006.png")) << o.err;
  for (const char* file :
       {"config.yml", "metrics.jsonl", "starts.jsonl", "loss.png", "samples/step_000004.png", "samples/step_000006.png",
        "samples/reconstructions.png", "metrics/metrics_step_000001_to_step_000004.txt", "vae/loss.png",
        "vae/metrics.jsonl", "checkpoints/6/model_index.json", "checkpoints/6/unet/config.json",
        "checkpoints/6/unet/diffusion_pytorch_model.safetensors",
        "checkpoints/6/vae/diffusion_pytorch_model.safetensors", "checkpoints/6/text_encoder/model.safetensors",
        "checkpoints/6/text_encoder_2/model.safetensors", "checkpoints/6/tokenizer/vocab.json",
        "checkpoints/6/tokenizer_2/merges.txt", "checkpoints/6/scheduler/scheduler_config.json"})
    EXPECT_TRUE(exists(run + "/" + file)) << file;
  EXPECT_FALSE(fs::is_empty(run + "/tensorboard"));
  EXPECT_EQ(lines(run + "/metrics.jsonl"), 6);
  const std::string page = run + "/report.html";  // its plots show metrics.jsonl
  ASSERT_EQ(maxdiffusion({"report", run, "-o", page}).status, 0);
  const std::string text = read_file(page);
  const size_t data = text.find("application/json\">") + 18;
  const json shown = parse_json(text.substr(data, text.find("</script>", data) - data))["runs"][0];
  std::istringstream written(read_file(run + "/metrics.jsonl"));
  size_t step = 0;
  for (std::string line; std::getline(written, line); ++step) {
    const json values = parse_json(line);
    for (const auto& [name, value] : values.items()) {
      if (!value.is_number()) continue;
      EXPECT_EQ(name == "step" ? shown["steps"][step] : shown["metrics"][name][step], value) << name;
    }
  }
  EXPECT_EQ(step, 6u);
  EXPECT_EQ(shown["samples"].size(), 2u);
  EXPECT_EQ(shown["starts"].size(), 1u);
  EXPECT_EQ(shown["metrics"]["goodput"].size(), 6u);
  json vae = parse_json(read_file(run + "/checkpoints/6/vae/config.json"));
  EXPECT_NE(vae.at("scaling_factor"), 1.0);
  // The resolved config can be read again, and a second call only samples.
  EXPECT_EQ(maxdiffusion({"inspect", "config", run + "/config.yml"}).status, 0);
  // The environment may differ: libtpu's flags are read by the plugin and written to the log.
  const std::string timed = read_file(timing);
  std::vector<std::string> untimed = whole;
  untimed.push_back("write_timing_metrics=false");
  Outcome again = maxdiffusion(untimed, "LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536");
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(lines(run + "/metrics.jsonl"), 6);
  EXPECT_EQ(read_file(timing), timed);
  int noted = 0;
  for (const auto& events : fs::directory_iterator(run + "/tensorboard"))
    noted += contains(read_file(events.path()), "--xla_tpu_scoped_vmem_limit_kib=65536");
  EXPECT_EQ(noted, 1);
  EXPECT_EQ(maxdiffusion(whole, "-u LIBTPU_INIT_ARGS").status, 0);
}

// S1-50
TEST(Train, TheAutoencoderFollowsItsKeys) {
  auto first = [](const std::string& name, const std::vector<std::string>& extra) {
    std::vector<std::string> w = words(name, {"vae_max_train_steps=1", "max_train_steps=1", "prompt=[]"});
    w.insert(w.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(w);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(lines(run_folder(name) + "/vae/metrics.jsonl"), 1);
    return parse_json(read_file(run_folder(name) + "/vae/metrics.jsonl"));
  };
  const json plain = first("vae_plain", {}), held = first("vae_held", {"vae_kl_weight=100", "vae_learning_rate=3e-4"});
  EXPECT_NEAR(held["learning_rate"].get<double>(), 3e-4, 1e-9);
  EXPECT_NE(plain["learning_rate"], held["learning_rate"]);
  EXPECT_GT(held["loss"].get<double>(), plain["loss"].get<double>());
  const Outcome o = maxdiffusion(words("vae_bad", {"vae_per_device_batch_size=0.5"}));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "vae_per_device_batch_size is 0.5; on 1 device that is 0.5 images, expected a whole"))
      << o.err;
}

/// Starts the program and sends a signal once `due` is true. Returns its status as waitpid does, and its output.
std::pair<int, std::string> signalled(const std::vector<std::string>& line, int signal,
                                      const std::function<bool()>& due) {
  static int files = 0;
  const std::string err = shared().folder / ("signalled" + std::to_string(files++));
  const pid_t child = fork();
  if (child == 0) {
    std::vector<char*> argv = {const_cast<char*>("maxdiffusion")};
    for (const std::string& w : line) argv.push_back(const_cast<char*>(w.c_str()));
    argv.push_back(nullptr);
    if (!freopen(err.c_str(), "w", stderr)) _exit(126);
    execv(MD_BINARY_DIR "/maxdiffusion", argv.data());
    _exit(127);
  }
  int status = 0;
  bool sent = false;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (!sent && due()) sent = kill(child, signal) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return {status, read_file(err)};
}

TEST(Train, ASignalSavesTheStepsDoneAndSaysWhere) {
  const std::string run = run_folder("signalled");
  // No checkpoint would be saved before the end.
  const auto [status, log] =
      signalled(words("signalled", {"max_train_steps=1000000", "checkpoint_every=-1", "log_period=1"}), SIGTERM,
                [&] { return exists(run + "/metrics.jsonl") && lines(run + "/metrics.jsonl") >= 3; });
  ASSERT_TRUE(WIFEXITED(status)) << log;
  EXPECT_EQ(WEXITSTATUS(status), 143) << log;
  const int64_t done = lines(run + "/metrics.jsonl");
  const std::string saved = run + "/checkpoints/" + std::to_string(done);
  EXPECT_TRUE(contains(log, "SIGTERM: finishing and saving this step")) << log;
  EXPECT_TRUE(
      contains(log, "stopped by SIGTERM after step " + std::to_string(done) + " of 1000000\n  saved in " + saved))
      << log;
  EXPECT_TRUE(exists(saved + "/training_state/checksums.json"));
  EXPECT_EQ(std::distance(fs::directory_iterator(run + "/checkpoints"), fs::directory_iterator()), 1);
  const std::string last = std::to_string(done + 3);
  ASSERT_EQ(maxdiffusion(words("signalled", {"max_train_steps=" + last})).status, 0);
  ASSERT_EQ(maxdiffusion(words("not_signalled", {"max_train_steps=" + last})).status, 0);
  for (const char* file : {"unet/diffusion_pytorch_model.safetensors", "training_state/arrays.safetensors"})
    EXPECT_EQ(read_file(run + "/checkpoints/" + last + "/" + file),
              read_file(run_folder("not_signalled") + "/checkpoints/" + last + "/" + file))
        << file;
}

TEST(Train, ASignalBeforeTheFirstStepEndsAtOnceWithoutHalfAFile) {
  const std::string run = run_folder("early");
  const auto [status, log] = signalled(words("early"), SIGINT, [&] { return exists(run + "/config.yml"); });
  ASSERT_TRUE(WIFEXITED(status)) << log;
  EXPECT_EQ(WEXITSTATUS(status), 130) << log;
  EXPECT_TRUE(contains(log, "SIGINT")) << log;
  for (const auto& f : fs::recursive_directory_iterator(run))
    EXPECT_FALSE(contains(f.path().filename(), ".tmp")) << f.path();
}

TEST(Train, ARefusedConfigAndASecondRunLeaveTheRunAlone) {
  const std::string run = run_folder("alone");
  ASSERT_EQ(maxdiffusion(words("alone")).status, 0);
  const std::string config = read_file(run + "/config.yml");
  for (const char* word : {"per_device_batch_size=-2", "gradient_accumulation_steps=0", "vae_per_device_batch_size=0",
                           "train_data_dir=/nowhere", "learning_rate=nan", "per_device_batch_size=64"}) {
    const Outcome o = maxdiffusion(words("alone", {word, "max_train_steps=7"}));
    EXPECT_NE(o.status, 0) << word;
    EXPECT_EQ(read_file(run + "/config.yml"), config) << word;
  }
  Outcome large = maxdiffusion(words("alone", {"per_device_batch_size=64"}));
  EXPECT_EQ(large.status, 2);
  EXPECT_TRUE(contains(large.err, "per_device_batch_size: a batch of 64 samples; expected at most 9")) << large.err;
  // While one process trains the run, a second one fails with an error that names the first.
  std::string second;
  const auto [status, log] = signalled(words("alone", {"max_train_steps=1000000", "log_period=1"}), SIGINT, [&] {
    if (lines(run + "/metrics.jsonl") < 8) return false;
    const Outcome o = maxdiffusion(words("alone"));
    EXPECT_EQ(o.status, 4);
    second = o.err;
    return true;
  });
  EXPECT_EQ(WEXITSTATUS(status), 130) << log;
  EXPECT_TRUE(contains(second, "'" + run + "' is in use by process ")) << second;
}

// S4-99, S4-101, S4-102, P-6
TEST(Train, ResumesAfterKillToTheBit) {
  // The learning-rate schedule has its own length, so the number of steps only changes the end.
  const std::string run = run_folder("killed");
  // Kills the UNet's training once a checkpoint is saved.
  const int status =
      signalled(words("killed", {"max_train_steps=1000000"}), SIGKILL, [&] {
        return exists(run + "/checkpoints/4") || exists(run + "/checkpoints/6") || exists(run + "/checkpoints/8");
      }).first;
  ASSERT_TRUE(WIFSIGNALED(status)) << "the run ended by itself, with status " << WEXITSTATUS(status);
  int64_t newest = 0;
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") == name.npos) newest = std::max<int64_t>(newest, std::stoll(name));
  }
  ASSERT_GT(newest, 0);
  const std::string last = std::to_string(newest + 5), steps = "max_train_steps=" + last;
  Outcome resumed = maxdiffusion(words("killed", {steps}));
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_TRUE(contains(resumed.err, "continues from")) << resumed.err;
  ASSERT_EQ(maxdiffusion(words("calm", {steps})).status, 0);
  for (const char* file : {"unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors",
                           "training_state/arrays.safetensors"})
    EXPECT_EQ(read_file(run + "/checkpoints/" + last + "/" + file),
              read_file(run_folder("calm") + "/checkpoints/" + last + "/" + file))
        << file;
  EXPECT_EQ(lines(run + "/metrics.jsonl"), newest + 5);
}

// S2-25, S4-25
TEST(Train, ScaleLrMultipliesTheRateByTheGlobalBatch) {
  ASSERT_EQ(maxdiffusion(words("plain_rate", {"max_train_steps=2"})).status, 0);
  ASSERT_EQ(maxdiffusion(words("scaled_rate", {"max_train_steps=2", "scale_lr=true"})).status, 0);
  auto rate = [](const std::string& name) {
    const std::string text = read_file(run_folder(name) + "/metrics.jsonl");
    return parse_json(text.substr(text.rfind('\n', text.size() - 2) + 1)).at("learning_rate").get<double>();
  };
  ASSERT_GT(rate("plain_rate"), 0);
  EXPECT_NEAR(rate("scaled_rate") / rate("plain_rate"), 4, 1e-4);
}

TEST(Train, ImagesThatDoNotDecodeAreNamedAndSkipped) {
  const std::string folder = shared().folder / "damaged";
  fs::copy(shared().images, folder);
  fs::resize_file(folder + "/3.png", 60);
  Outcome o = maxdiffusion(words("damaged", {"train_data_dir=" + folder}));
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, folder + "/3.png")) << o.err;
  EXPECT_TRUE(contains(o.err, "8 images, 1 skipped")) << o.err;
}

// S4-16
TEST(Train, DamagedWeightsAreRefusedByName) {
  ASSERT_EQ(maxdiffusion(words("donor")).status, 0);
  const std::string donor = run_folder("donor") + "/checkpoints/6", model = shared().folder / "from_donor";
  auto start = [&](const std::string& name) {
    return maxdiffusion(words(name, {"pretrained_model_name_or_path=" + model, "train_new_unet=false",
                                     "train_new_vae=false", "random_text_encoder=false"}));
  };
  fs::copy(donor, model, fs::copy_options::recursive);
  Outcome good = start("tuned");
  EXPECT_EQ(good.status, 0) << good.err;

  const std::string weights = model + "/unet/diffusion_pytorch_model.safetensors";
  fs::resize_file(weights, fs::file_size(weights) - 5);
  Outcome cut = start("cut");
  EXPECT_EQ(cut.status, 4) << cut.err;
  EXPECT_TRUE(contains(cut.err, weights)) << cut.err;

  fs::copy_file(donor + "/vae/diffusion_pytorch_model.safetensors", weights, fs::copy_options::overwrite_existing);
  Outcome other = start("other");
  EXPECT_EQ(other.status, 4) << other.err;
  EXPECT_TRUE(contains(other.err, "conv_norm_out") || contains(other.err, "time_embedding")) << other.err;
  EXPECT_FALSE(contains(other.err, "train unet: program")) << "found out after compiling: " << other.err;
}

// S4-16, P-1
TEST(Train, AfterwardsGenerateSamplesTheTrainedModel) {
  // Models that started from random values have been trained.
  ASSERT_EQ(maxdiffusion(words("drawn_from")).status, 0);
  auto generate = [](const std::vector<std::string>& extra) {
    const std::string to = shared().folder / "sampled";
    fs::remove_all(to);
    std::vector<std::string> all = {"generate", run_folder("drawn_from") + "/config.yml", "output_type=np",
                                    "prompt=shade number 1", "output_dir=" + to};
    all.insert(all.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(all);
    EXPECT_EQ(o.status, 0) << o.err;
    return read_file(to + "/images.safetensors");
  };
  const std::string generated = generate({}), checkpoint = run_folder("drawn_from") + "/checkpoints/6";
  EXPECT_EQ(generate({"pretrained_model_name_or_path=" + checkpoint}), generated);
  EXPECT_EQ(generate({"pretrained_model_name_or_path=" + checkpoint, "train_new_unet=false", "train_new_vae=false",
                      "random_text_encoder=false"}),
            generated);
}

// S4-22
TEST(Train, TextEncodersOfSdxlAreTrainedByLoraOnly) {
  const Outcome o = maxdiffusion(words("texts", {"train_text_encoder=true"}));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "train_text_encoder: models with two text encoders")) << o.err;
}

// S0-91, S1-56, S2-113, S3-30
TEST(Train, ShardedOverEightDevicesWritesTheSameFiles) {
  Outcome o = maxdiffusion(words(
      "mesh", {"cpu_device_count=8", "ici_data_parallelism=2", "ici_fsdp_parallelism=-1", "ici_tensor_parallelism=2",
               "per_device_batch_size=0.5", "vae_per_device_batch_size=1", "log_sharding=true",
               "xla_flags=--xla_backend_optimization_level=0"}));  // half the time to compile
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "attn1.to_q.weight f32[16,16] [heads→tensor, embed→fsdp], f32[8,8] on each device"))
      << o.err;
  EXPECT_TRUE(contains(o.err, "Found 8 devices")) << o.err;
  for (const char* line :
       {"***** Running training *****", "  Instantaneous batch size per device = 0.5\n",
        "  Total train batch size (w. parallel & distributed) = 4\n", "  Total optimization steps = 6\n"})
    EXPECT_TRUE(contains(o.err, line)) << o.err;
  EXPECT_TRUE(std::regex_search(
      o.err, std::regex(R"(completed step: 6, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, loss: \d+\.\d{3}\n)")))
      << o.err;
  EXPECT_TRUE(exists(run_folder("mesh") + "/checkpoints/6/unet/diffusion_pytorch_model.safetensors"));
  EXPECT_EQ(lines(run_folder("mesh") + "/metrics.jsonl"), 6);
}

// Values of features that are switched off are normal in a file for several commands.
TEST(Train, ShippedFilesHaveNoIgnoredKeysButThoseOfTheCommandLine) {
  TemporaryFolder t;
  for (const auto& [file, model] :
       {std::pair{"base_xl", "sdxl"}, {"base14", "sd"}, {"base15", "sd"}, {"base21", "sd2"}, {"base_2_base", "sd2"}}) {
    std::vector<std::string> words = {
        "train",
        fmt::format(MD_SOURCE_DIR "/configs/{}.yml", file),
        fmt::format("pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/{}", model),
        "output_dir=" + t.path(),
        "run_name=warns",
        "dataset_name=",
        "train_data_dir=" + (t / "nothing")};
    const Outcome quiet = maxdiffusion(words);
    EXPECT_TRUE(contains(quiet.err, "nothing': no such file or folder")) << quiet.err;
    EXPECT_FALSE(contains(quiet.err, "ignored")) << file << "\n" << quiet.err;
    words.emplace_back("profiler_steps=3");
    EXPECT_TRUE(contains(maxdiffusion(words).err, "profiler_steps is ignored: nothing is profiled")) << file;
  }
}

}  // namespace
}  // namespace md
