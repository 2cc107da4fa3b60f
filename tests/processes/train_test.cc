// Runs of the real program in several processes started by MPICH's launcher: they learn what one process learns, and
// react to the loss of one of them.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/user_cache.h"
#include "maxdiffusion/media/image.h"
#include "tests/bucket_server.h"
#include "tests/processes/job.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

/// The folder shared by all tests of this file: images, and a model that compiles in seconds.
struct Shared {
  TemporaryFolder folder;
  std::string images = folder / "pictures", model = folder / "model";

  Shared() {
    write_shades(images, 16);
    write_tiny_model(model);
  }
  std::string run(const std::string& name) const { return folder / ("runs/" + name); }
};
const Shared& shared() {
  static const Shared s;
  return s;
}

/// Command line of a run; later words win.
std::string train(const std::string& name, const std::string& extra) {
  return MD_BINARY_DIR "/maxdiffusion train " MD_SOURCE_DIR "/configs/quickstart.yml output_dir=" +
         (shared().folder / "runs") + " run_name=" + name +
         " dataset_name= activations_dtype=float32 resolution=16 global_batch_size=4 learning_rate_schedule_steps=100 "
         "optimizer=adamw optimizer_args=[] noise_offset=0.1 input_perturbation=0.1 num_inference_steps=2 "
         "xla_flags=--xla_backend_optimization_level=0 " +
         extra;
}

/// A run on images with everything that a training run does.
std::string on_images(const std::string& name, int64_t processes, const std::string& extra = "") {
  const Shared& s = shared();
  return train(name, "pretrained_model_name_or_path=" + s.model + " train_data_dir=" + s.images +
                         " eval_data_dir=" + s.images + " dataset_save_location=" + (s.folder / ("data_" + name)) +
                         fmt::format(" vae_max_train_steps=2 vae_per_device_batch_size={} ", 4.0 / processes) +
                         "max_train_steps=4 checkpoint_every=8 caption_dropout=0.2 sample_every=2 eval_every=2 "
                         "timesteps_list=[250,500] 'prompt=[\"shade number 1\"]' " +
                         extra);
}

/// A run on random latents, with the models of a single-process run on images.
std::string on_latents(const std::string& name, const std::string& extra = "") {
  static const JobResult first = run_job(1, on_images("first", 1));
  EXPECT_EQ(first.status, 0) << first.output;
  return train(name, "pretrained_model_name_or_path=" + shared().run("first") +
                         "/checkpoints/4 dataset_type=synthetic synthetic_num_samples=11 train_new_vae=false "
                         "caption_dropout=0 prompt=[] max_train_steps=4 checkpoint_every=-1 " +
                         extra);
}

/// The metric of every step that has it.
std::vector<double> metric(const std::string& name, const char* which = "loss") {
  std::vector<double> out;
  std::istringstream lines(read_file(shared().run(name) + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);)
    if (const json values = parse_json(line); values.contains(which)) out.push_back(values.at(which));
  return out;
}

/// All numeric contents of a checkpoint.
std::string numbers(const std::string& name, int64_t step) {
  const std::string folder = shared().run(name) + "/checkpoints/" + std::to_string(step);
  return read_file(folder + "/unet/diffusion_pytorch_model.safetensors") +
         read_file(folder + "/training_state/arrays.safetensors");
}

void expect_close(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-5 * std::abs(expected[i])) << "step " << i + 1;
}

/// The pid of a run's process with this rank; 0 if there is none.
pid_t process_of(const std::string& run, int rank) {
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string pid = entry.path().filename();
    if (!std::isdigit(pid[0])) continue;
    std::ifstream line(entry.path() / "cmdline"), variables(entry.path() / "environ");
    const std::string words{std::istreambuf_iterator<char>(line), {}},
        environment{std::istreambuf_iterator<char>(variables), {}};
    if (words.starts_with(MD_BINARY_DIR "/maxdiffusion") &&
        words.find(std::string("run_name=") + run + '\0') != words.npos &&
        ('\0' + environment).find(std::string("\0PMI_RANK=", 10) + std::to_string(rank) + '\0') != environment.npos)
      return std::stoi(pid);
  }
  return 0;
}

/// Starts an endless run, waits for a checkpoint of step `after`, sends `signal` to one rank, and waits for the end.
struct Signalled {
  JobResult job;
  double seconds = 0;  // from the signal until the other processes ended
};
Signalled signalled(const std::string& name, int processes, int rank, int signal, int64_t after) {
  auto job = std::async(std::launch::async, [&] {
    return run_job(processes, on_latents(name, "max_train_steps=1000000 checkpoint_every=8"));
  });
  const std::string checkpoint = shared().run(name) + "/checkpoints/" + std::to_string(after);
  const auto begun = Clock::now();
  while (!fs::exists(checkpoint) && Clock::now() - begun < std::chrono::minutes(3) &&
         job.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
  }
  const pid_t victim = process_of(name, rank);
  Signalled out;
  if (victim == 0) {
    ADD_FAILURE() << "rank " << rank << " is not there";
  } else {
    ::kill(victim, signal);
    const auto sent = Clock::now();
    auto others_run = [&] {
      for (int r = 0; r < processes; ++r)
        if (r != rank && process_of(name, r) != 0) return true;
      return false;
    };
    while (others_run() && Clock::now() - sent < std::chrono::seconds(60))
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    out.seconds = std::chrono::duration<double>(Clock::now() - sent).count();
    if (signal == SIGSTOP) ::kill(victim, SIGKILL);
  }
  out.job = job.get();
  return out;
}

// S3-1, S3-2, S3-19
TEST(ProcessesTrain, EqualOneProcess) {
  const std::string both = "gradient_accumulation_steps=2 ";
  const JobResult alone = run_job(1, on_latents("alone", both));
  ASSERT_EQ(alone.status, 0) << alone.output;
  const std::vector<double> expected = metric("alone");
  ASSERT_EQ(expected.size(), 4u);
  for (const auto& [processes, devices] : {std::pair{2, 1}, {4, 1}, {2, 2}}) {
    const std::string name = fmt::format("of_{}_{}", processes, devices);
    const JobResult job = run_job(
        processes,
        on_latents(name, both + fmt::format("cpu_device_count={} ici_data_parallelism=1 ici_fsdp_parallelism={}",
                                            devices, devices)));
    ASSERT_EQ(job.status, 0) << job.output;
    expect_close(metric(name), expected);
    EXPECT_NE(job.output.find(fmt::format("Found {} devices: {} processes", processes * devices, processes)),
              std::string::npos)
        << job.output;
    // Only process 0 logs.
    const std::regex line("Running training");
    EXPECT_EQ(1, std::distance(std::sregex_iterator(job.output.begin(), job.output.end(), line), {})) << job.output;
  }
}

TEST(ProcessesTrain, EncodingTrainingSamplingAndEvaluationEqualOneProcess) {
  on_latents("");  // the single-process run
  const JobResult job =
      run_job(2, on_images("pictures", 2, "cpu_device_count=2 ici_data_parallelism=2 vae_per_device_batch_size=1"));
  ASSERT_EQ(job.status, 0) << job.output;
  const std::string folder = shared().run("pictures");
  expect_close(metric("pictures"), metric("first"));
  expect_close(metric("pictures/vae"), metric("first/vae"));
  EXPECT_EQ(metric("pictures", "eval_loss").size(), 2u);
  expect_close(metric("pictures", "eval_loss"), metric("first", "eval_loss"));
  for (const char* file : {"config.yml", "loss.png", "samples/step_000002.png", "samples/step_000004.png",
                           "checkpoints/2/model_index.json", "checkpoints/4/vae/config.json"})
    EXPECT_TRUE(fs::exists(folder + "/" + file)) << file;
  EXPECT_EQ(job.output.find("[1]"), std::string::npos) << job.output;
}

// Repeats, captions that vary and buckets are chosen by the sample's place in the common order, not by the process.
TEST(ProcessesTrain, OfDatasetFilesOfOtherTrainersEqualOneProcess) {
  const Shared& s = shared();
  const std::string few = s.folder / "few", wide = s.folder / "wide";
  make_folders(few);
  make_folders(wide);
  for (int i = 0; i < 3; ++i) {
    for (const char* type : {".png", ".txt"}) fs::copy(fmt::format("{}/{}{}", s.images, i, type), few);
    HostArray rgb(Shape{DType::u8, {16, 32, 3}});
    std::ranges::fill(rgb.mutable_view<uint8_t>(), static_cast<uint8_t>(60 * i + 40));
    write_png(fmt::format("{}/{}.png", wide, i), rgb);
    write_file_atomic(fmt::format("{}/{}.txt", wide, i), fmt::format("wide, shade, number {}", i));
  }
  const std::string kohya = s.folder / "kohya.toml", musubi = s.folder / "musubi.toml";
  write_file_atomic(kohya, fmt::format("[general]\ncaption_extension = '.txt'\nshuffle_caption = true\n"
                                       "[[datasets]]\nresolution = 16\nbatch_size = 4\n"
                                       "[[datasets.subsets]]\nimage_dir = '{}'\nnum_repeats = 3\n"
                                       "[[datasets.subsets]]\nimage_dir = '{}'\ncaption_dropout_rate = 0.3\n"
                                       "caption_prefix = 'wide '\nflip_aug = true\n",
                                       few, wide));
  write_file_atomic(musubi, fmt::format("[general]\nresolution = [16, 16]\ncaption_extension = '.txt'\n"
                                        "enable_bucket = false\n"
                                        "[[datasets]]\nimage_directory = '{}'\nnum_repeats = 2\n"
                                        "[[datasets]]\nimage_directory = '{}'\n",
                                        few, wide));
  for (const std::string& file : {kohya, musubi}) {
    const std::string name = fs::path(file).stem();
    const auto of = [&](int processes, const std::string& extra) {
      const std::string run = fmt::format("{}_{}", name, processes);
      const JobResult job = run_job(
          processes, train(run, "pretrained_model_name_or_path=" + s.run("first") + "/checkpoints/4 dataset_config=" +
                                    file + " dataset_save_location=" + (s.folder / ("data_" + run)) +
                                    " train_new_vae=false random_text_encoder=false prompt=[] max_train_steps=8 "
                                    "checkpoint_every=-1 " +
                                    extra));
      EXPECT_EQ(job.status, 0) << job.output;
      return metric(run);
    };
    on_latents("");  // the single-process run whose models these are
    const std::vector<double> expected = of(1, "");
    ASSERT_EQ(expected.size(), 8u);
    expect_close(of(2, ""), expected);
  }
}

TEST(ProcessesTrain, ResumeAfterAKillIsBitExact) {
  const Signalled killed = signalled("killed", 2, 1, SIGKILL, 4);
  EXPECT_LT(killed.seconds, 10);
  EXPECT_EQ(killed.job.statuses, (std::vector<int>{5, 128 + SIGKILL})) << killed.job.output;
  EXPECT_TRUE(std::regex_search(killed.job.output, std::regex(R"(E [\d:]+ process 1 \(\S+, pid \d+\) is lost: its)")))
      << killed.job.output;
  int64_t newest = 0;
  for (const auto& e : fs::directory_iterator(shared().run("killed") + "/checkpoints"))
    if (std::isdigit(e.path().filename().string()[0]))
      newest = std::max<int64_t>(newest, std::stoll(e.path().filename()));
  const std::string extra = fmt::format("checkpoint_every=8 max_train_steps={}", newest + 3);
  const JobResult resumed = run_job(2, on_latents("killed", extra)), whole = run_job(2, on_latents("whole", extra));
  ASSERT_EQ(resumed.status, 0) << resumed.output;
  ASSERT_EQ(whole.status, 0) << whole.output;
  EXPECT_NE(resumed.output.find(fmt::format("continues from {}/checkpoints/{}", shared().run("killed"), newest)),
            std::string::npos)
      << resumed.output;
  EXPECT_TRUE(numbers("killed", newest + 3) == numbers("whole", newest + 3));
}

// S2-76, S4-70
TEST(ProcessesTrain, OneReadsTheCheckpointForAllIfConfigured) {
  const JobResult whole = run_job(2, on_latents("two", "checkpoint_every=8"));
  ASSERT_EQ(whole.status, 0) << whole.output;
  // Only process 0 finds a checkpoint in its folder.
  const std::string dir = shared().folder / "seen_by_";
  fs::create_directories(dir + "0");
  fs::copy(shared().run("two") + "/checkpoints/2", dir + "0/2", fs::copy_options::recursive);
  const std::string extra = "save_final_checkpoint=false checkpoint_dir=" + dir + "$PMI_RANK ";
  const JobResult one = run_job(2, on_latents("one_reads", extra + "enable_single_replica_ckpt_restoring=true"));
  ASSERT_EQ(one.status, 0) << one.output;
  const std::vector<double> all = metric("two"), found = metric("one_reads");
  EXPECT_EQ(found, std::vector<double>(all.begin() + 2, all.end()));
  const JobResult both = run_job(2, on_latents("both_read", extra));
  EXPECT_EQ(both.status, 4) << both.output;
  EXPECT_NE(both.output.find("seen_by_1': process 1 on"), std::string::npos) << both.output;
  const JobResult alone =
      run_job(1, on_latents("alone_reads",
                            "enable_single_replica_ckpt_restoring=true checkpoint_dir=" + dir + "0 max_train_steps=2"));
  EXPECT_EQ(alone.status, 0) << alone.output;
  EXPECT_NE(alone.output.find("enable_single_replica_ckpt_restoring is ignored: each process"), std::string::npos)
      << alone.output;
}

TEST(ProcessesTrain, EndsWhereOneIsStopped) {
  for (int rank : {0, 1}) {
    const std::string name = fmt::format("stopped_{}", rank);
    const Signalled stopped = signalled(name, 2, rank, SIGSTOP, 2);
    EXPECT_LT(stopped.seconds, 10);
    EXPECT_EQ(stopped.job.statuses[static_cast<size_t>(1 - rank)], 5) << stopped.job.output;
    EXPECT_TRUE(std::regex_search(
        stopped.job.output,
        std::regex(fmt::format(R"(process {} \(\S+, pid \d+\) is lost: nothing was heard of it for)", rank))))
        << stopped.job.output;
  }
}

TEST(ProcessesTrain, SavesAndStopsTogetherOnASignalToOne) {
  const Signalled signalled_run = signalled("told", 2, 1, SIGTERM, 2);
  EXPECT_EQ(signalled_run.job.statuses, (std::vector<int>{128 + SIGTERM, 128 + SIGTERM})) << signalled_run.job.output;
  std::smatch m;
  ASSERT_TRUE(
      std::regex_search(signalled_run.job.output, m, std::regex(R"(stopped by SIGTERM after step (\d+) of 1000000)")))
      << signalled_run.job.output;
  EXPECT_TRUE(fs::exists(shared().run("told") + "/checkpoints/" + m[1].str() + "/training_state/state.json"));
}

/// GPUs simulated by the test plugin: one device per process, in one mesh.
std::string on_gpus(const std::string& name, const std::string& extra) {
  return on_latents(name, "hardware=gpu plugin=" MD_BINARY_DIR "/test_plugins/several_processes.so " + extra);
}

// S3-1, S3-2
TEST(JointTraining, EqualsOneProcessAndResumesWithOthers) {
  const std::string two_by_two = "ici_data_parallelism=2 ici_fsdp_parallelism=2 ",
                    steps = "checkpoint_every=4 checkpoints_to_keep=0 eval_every=0 ";
  const JobResult alone = run_job(1, on_latents("alone_6", steps + "max_train_steps=6"));
  ASSERT_EQ(alone.status, 0) << alone.output;
  const std::vector<double> expected = metric("alone_6");
  const JobResult four = run_job(4, on_gpus("joint", steps + two_by_two));
  ASSERT_EQ(four.status, 0) << four.output;
  expect_close(metric("joint"), {expected.begin(), expected.begin() + 4});
  EXPECT_NE(four.output.find("this process has 1 of the devices; there are 4 processes"), std::string::npos)
      << four.output;
  const std::string folder = shared().run("joint") + "/checkpoints/4";
  EXPECT_TRUE(fs::exists(folder + "/training_state/pieces-00001-of-00004.safetensors"));
  EXPECT_FALSE(fs::exists(folder + "/unet/diffusion_pytorch_model.safetensors"));

  // Two processes find a flipped bit in the file of one of the four, and resume from the checkpoint before it; one
  // process without GPUs resumes from theirs.
  const std::string shards = folder + "/training_state/pieces-00001-of-00004.safetensors";
  std::string bytes = read_file(shards);
  bytes[bytes.size() - 3] ^= 4;
  write_file_atomic(shards, bytes);
  const JobResult two =
      run_job(2, on_gpus("joint", steps + "ici_data_parallelism=1 ici_fsdp_parallelism=2 max_train_steps=5"));
  ASSERT_EQ(two.status, 0) << two.output;
  EXPECT_NE(two.output.find(shards + "': its bytes differ from those written"), std::string::npos) << two.output;
  EXPECT_TRUE(fs::exists(folder + ".damaged"));
  const JobResult one = run_job(1, on_latents("joint", steps + "max_train_steps=6"));
  ASSERT_EQ(one.status, 0) << one.output;
  expect_close(metric("joint"), expected);
}

/// Runs of two processes with separate cache folders, which share only a bucket.
class BucketAlone : public testing::Test {
 protected:
  BucketAlone() {
    server.put("runs", "", "");
    on_latents("");  // the single-process run
    server.put_files("runs", "model", shared().run("first") + "/checkpoints/4");
    server.put_files("runs", "pictures", shared().images);
  }
  /// `cache`: name of each process's cache folder as a shell expression. Process 0 also uses the programs compiled by
  /// other tests.
  std::string words(const std::string& place, const std::string& cache, const std::string& command) const {
    const std::string cache_folder = t / ("cache_" + cache);
    return "mkdir -p " + cache_folder + "/maxdiffusion; [ $PMI_RANK -gt 0 ] || ln -sfn " + user_cache_folder() + " " +
           cache_folder + "/programs\n" + "XDG_CACHE_HOME=" + cache_folder + " MD_TEST_COMPILED=" + (t / "compiled") +
           " AWS_ENDPOINT_URL=http://" + server.address() +
           " AWS_ACCESS_KEY_ID=writer AWS_SECRET_ACCESS_KEY=hush AWS_EC2_METADATA_DISABLED=true AWS_REGION=here "
           "no_proxy=127.0.0.1 " +
           command + " output_dir=" + place + " jax_cache_dir=" + cache_folder + "/programs";
  }
  /// Kills the second process when it uploads the first file below `part` of the run.
  JobResult killed(const std::string& name, const std::string& part, const std::string& command) {
    std::atomic<bool> seen = false;
    server.on_write([&](const std::string& request) {
      if (request.find(part) == request.npos || seen.exchange(true)) return;
      if (const pid_t pid = process_of(name, 1)) ::kill(pid, SIGKILL);
    });
    JobResult out = run_job(2, command);
    server.on_write({});
    return out;
  }
  /// Expects equal files for step 6 in the bucket and in a run's folder.
  void expect_equal(const std::string& prefix, const std::string& folder) {
    std::set<std::string> found, expected;
    for (const std::string& key : server.keys("runs"))
      if (key.starts_with(prefix) && !key.ends_with('/')) found.insert(key.substr(prefix.size()));
    for (const auto& f : fs::recursive_directory_iterator(folder))
      if (f.is_regular_file()) expected.insert(f.path().lexically_relative(folder));
    EXPECT_EQ(found, expected);
    EXPECT_FALSE(expected.empty());
    for (const std::string& name : expected)
      EXPECT_TRUE(server.object("runs", prefix + name) == read_file(folder + "/" + name)) << name;
  }
  std::vector<double> losses(const std::string& name) {
    std::vector<double> out;
    std::istringstream lines(server.object("runs", name + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) out.push_back(parse_json(line).at("loss"));
    return out;
  }
  TemporaryFolder t;
  BucketServer server;
};

using JointTrainingWithABucketAlone = BucketAlone;
// S3-29
TEST_F(JointTrainingWithABucketAlone, EndsAfterAKillAsARunWithASharedFolder) {
  const std::string steps =
      "checkpoint_every=4 checkpoints_to_keep=0 eval_every=0 max_train_steps=6 ici_data_parallelism=1 "
      "ici_fsdp_parallelism=2 pretrained_model_name_or_path=s3://runs/model";
  // The second process uploads only shards.
  const JobResult killed = this->killed("alone_in_bucket", "checkpoints/3/training_state/pieces-00001",
                                        words("s3://runs", "$PMI_RANK", on_gpus("alone_in_bucket", steps)));
  EXPECT_EQ(killed.statuses, (std::vector<int>{5, 128 + SIGKILL})) << killed.output;
  EXPECT_NE(server.object("runs", "alone_in_bucket/checkpoints/2/training_state/state.json"), "") << killed.output;
  EXPECT_EQ(server.object("runs", "alone_in_bucket/checkpoints/3/training_state/state.json"), "") << killed.output;
  // Another machine takes the place of the second process.
  const JobResult resumed = run_job(2, words("s3://runs", "$((PMI_RANK * 2))", on_gpus("alone_in_bucket", steps)));
  ASSERT_EQ(resumed.status, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("process 1 no longer has its part"), std::string::npos) << resumed.output;
  EXPECT_NE(resumed.output.find("continues from s3://runs/alone_in_bucket/checkpoints/2, "), std::string::npos)
      << resumed.output;
  const JobResult whole = run_job(
      2,
      on_gpus("shared_folder", steps + " pretrained_model_name_or_path=" + shared().run("first") + "/checkpoints/4"));
  ASSERT_EQ(whole.status, 0) << whole.output;
  expect_equal("alone_in_bucket/checkpoints/6/", shared().run("shared_folder") + "/checkpoints/6");
  EXPECT_EQ(losses("alone_in_bucket"), metric("shared_folder"));
  EXPECT_EQ(losses("alone_in_bucket").size(), 6u);
  // Only process 0 compiles the step, unless it is cached, and sends the program to the others.
  const std::string compiled = fs::exists(t / "compiled") ? read_file(t / "compiled") : "";
  EXPECT_EQ(compiled.find("1 module @train_unet"), std::string::npos) << compiled;
}

using ProcessesTrainWithABucketAlone = BucketAlone;
// S3-29
TEST_F(ProcessesTrainWithABucketAlone, EndsAfterAKillAsARunWithASharedFolder) {
  const auto command = [](const std::string& name, const std::string& model, const std::string& data) {
    return train(name, "pretrained_model_name_or_path=" + model + " train_data_dir=" + data +
                           " train_new_vae=false caption_dropout=0 prompt=[] max_train_steps=6 checkpoint_every=4 "
                           "checkpoints_to_keep=0 dataset_save_location= ");
  };
  const std::string in_bucket = command("cpu_in_bucket", "s3://runs/model", "s3://runs/pictures");
  const JobResult killed =
      this->killed("cpu_in_bucket", "checkpoints/3/unet/", words("s3://runs", "$PMI_RANK", in_bucket));
  EXPECT_EQ(killed.statuses, (std::vector<int>{5, 128 + SIGKILL})) << killed.output;
  const JobResult resumed = run_job(2, words("s3://runs", "$((PMI_RANK + 2))", in_bucket));
  ASSERT_EQ(resumed.status, 0) << resumed.output;
  // Process 0 may have uploaded the rest before it learned of the other's death.
  EXPECT_TRUE(std::regex_search(resumed.output,
                                std::regex("continues from s3://runs/cpu_in_bucket/checkpoints/[23], 1.2 MB read")))
      << resumed.output;
  // Process 0 encoded the images, and the second run found them in the bucket.
  EXPECT_NE(killed.output.find("caching latents"), std::string::npos) << killed.output;
  EXPECT_EQ(resumed.output.find("caching latents"), std::string::npos) << resumed.output;
  int64_t parts = 0;
  for (const std::string& key : server.keys("runs"))
    parts += key.starts_with("cpu_in_bucket/cache/") && key.ends_with(".safetensors");
  EXPECT_EQ(parts, 2);  // of the images and of their captions
  const JobResult whole =
      run_job(2, command("cpu_shared_folder", shared().run("first") + "/checkpoints/4", shared().images));
  ASSERT_EQ(whole.status, 0) << whole.output;
  expect_equal("cpu_in_bucket/checkpoints/6/", shared().run("cpu_shared_folder") + "/checkpoints/6");
  EXPECT_EQ(losses("cpu_in_bucket"), metric("cpu_shared_folder"));
}

TEST(ProcessesTrain, SayAtTheStartThatTheyDoNotSeeOneFolder) {
  const JobResult job =
      run_job(2, on_latents("unseen", "output_dir=" + (shared().folder / "of_$PMI_RANK") + " max_train_steps=1"));
  EXPECT_EQ(job.statuses, (std::vector<int>{4, 4})) << job.output;
  for (const char* says : {"of_0/unseen': process 1 on '", "does not find a file that process 0 on '",
                           "of_1/unseen': process 1", "output_dir=gs://BUCKET/PATH"})
    EXPECT_NE(job.output.find(says), std::string::npos) << says << "\n" << job.output;
  EXPECT_EQ(job.output.find("Running training"), std::string::npos) << job.output;
}

TEST(ProcessesTrain, SayAtTheStartThatTheirCommandsOrDataDiffer) {
  const std::string other = shared().folder / "other_pictures";
  write_shades(other, 12);
  const std::string data = shared().folder / "data_of_";
  fs::create_directory_symlink(shared().images, data + "0");
  fs::create_directory_symlink(other, data + "1");
  for (const auto& [name, keys, says] :
       {std::tuple<std::string, std::string, std::string>{"rate", "learning_rate=1e-$((3 + PMI_RANK))",
                                                          "learning_rate is 0.0001 in process 1; expected 0.001, as in "
                                                          "process 0"},
        {"word", "$([ $PMI_RANK = 0 ] || echo no_such_key=1)", "config: command line: there is no key `no_such_key`"},
        {"seed", "seed=$PMI_RANK", "seed is 1 in process 1; expected 0, as in process 0"},
        {"folder", "train_data_dir=" + data + "$PMI_RANK", "train_data_dir is "}}) {
    const JobResult job = run_job(
        2, train(name, "pretrained_model_name_or_path=" + shared().model + " train_data_dir=" + shared().images +
                           " train_new_vae=false max_train_steps=2 " + keys));
    EXPECT_EQ(job.statuses, (std::vector<int>{2, 2})) << job.output;
    EXPECT_NE(job.output.find("error: " + says), std::string::npos) << job.output;
    EXPECT_NE(job.output.find("[1] error: " + says), std::string::npos) << job.output;
    EXPECT_FALSE(exists(shared().run(name))) << job.output;
  }
  // Copies of the data: 40 images, of which one has another caption.
  const std::string copies = shared().folder / "copy_";
  for (const char* rank : {"0", "1"})
    for (int i = 0; i < 40; ++i) {
      const std::string copy = fmt::format("{}{}/data/{}", copies, rank, i);
      make_folders(fs::path(copy).parent_path());
      fs::copy_file(shared().images + "/0.png", copy + ".png");
      write_file_atomic(copy + ".txt", "shade");
    }
  const auto job = [&](const std::string& name) {
    return run_job(
        2, "cd " + copies + "$PMI_RANK && " +
               train(name, "pretrained_model_name_or_path=" + shared().model +
                               " train_data_dir=/proc/self/cwd/data train_new_vae=false random_text_encoder=true "
                               "train_new_unet=true max_train_steps=1"));
  };
  write_file_atomic(copies + "1/data/21.txt", "shape");
  const JobResult differs = job("caption");
  EXPECT_EQ(differs.statuses, (std::vector<int>{2, 2})) << differs.output;
  EXPECT_NE(differs.output.find("error: the data of process 1 is 40 records, "), std::string::npos) << differs.output;
}

TEST(JointTraining, RefusesWhatItCannotDoYet) {
  const JobResult lora = run_job(2, on_gpus("refused_gpu", "train_lora=true"));
  // Each refuses for itself (2), unless it learns first that the other has ended (5).
  ASSERT_EQ(lora.statuses.size(), 2u);
  EXPECT_EQ(std::ranges::count(lora.statuses, 2) + std::ranges::count(lora.statuses, 5), 2) << lora.output;
  EXPECT_GE(std::ranges::count(lora.statuses, 2), 1) << lora.output;
  EXPECT_NE(lora.output.find("train_lora: not supported with several processes on GPUs"), std::string::npos)
      << lora.output;
}

TEST(ProcessesTrain, RefusesWhatProcessesCannotSplit) {
  for (const auto& [key, says] :
       {std::pair{"dcn_fsdp_parallelism=2", "dcn_fsdp_parallelism is 2"},
        std::pair{"dcn_data_parallelism=3", "dcn_data_parallelism is 3, but 2 processes were started"},
        std::pair{"global_batch_size=3", "batch of 3 samples; expected a multiple of the 2 processes"}}) {
    const JobResult job = run_job(2, on_latents("refused", key));
    EXPECT_EQ(job.statuses, (std::vector<int>{2, 2})) << job.output;
    EXPECT_NE(job.output.find(says), std::string::npos) << job.output;
    EXPECT_NE(job.output.find("[1] error: "), std::string::npos) << job.output;
  }
  const JobResult generated =
      run_job(2, MD_BINARY_DIR "/maxdiffusion generate " MD_SOURCE_DIR "/configs/quickstart.yml");
  EXPECT_EQ(generated.statuses, (std::vector<int>{2, 2}));
  EXPECT_NE(generated.output.find("generate runs in one process; found 2"), std::string::npos) << generated.output;
}

}  // namespace
}  // namespace md
