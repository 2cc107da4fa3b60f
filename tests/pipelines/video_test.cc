// Videos that the program generates with a tiny folder: files, sizes, chunks, and errors.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/encoders/text_encoder.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/media/decode_video.h"
#include "maxdiffusion/media/gif.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/write_video.h"
#include "maxdiffusion/run/encode_dataset.h"
#include "maxdiffusion/run/training_data.h"
#include "tests/cli/command.h"
#include "tests/one_device.h"

namespace md {
namespace {

const std::string kFolders = MD_SOURCE_DIR "/tests/golden/wan/";

class Video : public testing::Test {
 protected:
  Outcome generate(const std::vector<std::string>& extra, const std::string& folder = "t2v") {
    std::vector<std::string> words = {"generate_wan",
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "pretrained_model_name_or_path=" + kFolders + folder,
                                      "output_dir=" + t.path(),
                                      "max_sequence_length=12",
                                      "prompt=a red heart",
                                      "num_inference_steps=3",
                                      "guidance_scale=3",
                                      "height=32",
                                      "width=48",
                                      "num_frames=9"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  HostArray tensor(const std::string& file, const std::string& name) {
    return SafetensorsReader::open(t / file).tensors().at(name);
  }
  static HostArray tensor_of_golden(const std::string& name) {
    return SafetensorsReader::open(kFolders + "golden.safetensors").tensors().at(name);
  }
  TemporaryFolder t;
};

double largest_difference(const HostArray& a, const HostArray& b) {
  EXPECT_EQ(a.dims(), b.dims());
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double worst = 0;
  for (size_t i = 0; i < x.size() && i < y.size(); ++i) worst = std::max(worst, std::abs(x[i] - y[i]));
  return worst;
}

double mean_difference(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += std::abs(x[i] - y.at(i));
  return sum / static_cast<double>(x.size());
}

// S2-97
TEST_F(Video, IsAnMp4OfItsRateFramesAndSize) {
  const Outcome o = generate({"fps=12", "seed=7", "num_images_per_prompt=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* name : {"wan_output_7_0.mp4", "wan_output_7_1.mp4"}) {
    const std::string bytes = read_file(t / name);
    EXPECT_EQ(decode_video(bytes, name).dims(), (Dims{9, 32, 48, 3}));
    const std::vector<double> times = open_video(bytes, name, 1)->times();
    ASSERT_EQ(times.size(), 9u);
    EXPECT_NEAR(times[8], 8.0 / 12, 1e-3);
  }
}

TEST_F(Video, IsAFolderOfFramesIfPngIsRequested) {
  ASSERT_EQ(generate({"output_type=png", "num_frames=5"}).status, 0);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(exists(t / fmt::format("wan_output_0_0/{:04}.png", i))) << i;
  EXPECT_FALSE(exists(t / "wan_output_0_0/0005.png"));
}

TEST_F(Video, IsTheSameDenoisedAtOnceOrStepByStep) {
  Outcome o = generate({"output_type=latent"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "denoising  3/3")) << o.err;
  const HostArray steps = tensor("latents.safetensors", "latents");
  EXPECT_EQ(steps.dims(), (Dims{1, 4, 3, 4, 6}));
  o = generate({"output_type=latent", "scan_diffusion_loop=true"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_FALSE(contains(o.err, "denoising  3/3")) << o.err;
  EXPECT_LE(largest_difference(steps, tensor("latents.safetensors", "latents")), 1e-5);
}

TEST_F(Video, IsTheSameToTheBitWithKeysAndValuesMadeOnce) {
  write_png(t / "image.png", tensor_of_golden("image"));
  const std::vector<std::string> words = {"output_type=latent", "max_sequence_length=512",
                                          "image=" + (t / "image.png")};
  auto latents = [&](std::vector<std::string> extra) {
    extra.insert(extra.end(), words.begin(), words.end());
    const Outcome o = generate(extra, "i2v");
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(contains(o.err, "keys and values of the prompt are computed once"),
              extra[0] == "use_kv_cache=true" && extra[1] != "scan_diffusion_loop=true")
        << o.err;
    return tensor("latents.safetensors", "latents");
  };
  const HostArray plain = latents({"use_kv_cache=false"});
  EXPECT_EQ(largest_difference(plain, latents({"use_kv_cache=true"})), 0);
  EXPECT_LE(largest_difference(plain, latents({"use_kv_cache=true", "scan_diffusion_loop=true"})), 1e-5);
  EXPECT_EQ(largest_difference(latents({"use_kv_cache=false", "num_images_per_prompt=3", "per_device_batch_size=2"}),
                               latents({"use_kv_cache=true", "num_images_per_prompt=3", "per_device_batch_size=2"})),
            0);
}

TEST_F(Video, CachesOfStepsSayWhatTheyLack) {
  auto refusal = [&](const std::vector<std::string>& words) {
    const Outcome o = generate(words);
    EXPECT_EQ(o.status, 2) << o.err;
    return o.err;
  };
  EXPECT_TRUE(contains(refusal({"use_cfg_cache=true", "guidance_scale=1"}),
                       "use_cfg_cache needs guidance in every step, but the scale of transformer is 1"));
  const std::string lacks = refusal({"use_magcache=true"});
  EXPECT_TRUE(contains(lacks, "use_magcache is true; expected mag_ratios_base: no ratios were measured")) << lacks;
  EXPECT_TRUE(contains(lacks, "try: mag_ratios_base=[1, 1, …]")) << lacks;
  EXPECT_TRUE(contains(refusal({"use_magcache=true", "mag_ratios_base=[1, 1, 1]"}),
                       "mag_ratios_base has 3 numbers; expected two for each step"));
  EXPECT_TRUE(contains(refusal({"use_magcache=true", "use_sen_cache=true"}), "several are true; expected one at most"));
}

TEST_F(Video, IsTheSameDecodedInChunksOrWhole) {
  ASSERT_EQ(generate({"output_type=np", "vae_decode_chunk=-1"}).status, 0);
  const HostArray whole = tensor("video.safetensors", "video");
  EXPECT_EQ(whole.dims(), (Dims{1, 9, 32, 48, 3}));
  for (const char* chunk : {"vae_decode_chunk=1", "vae_decode_chunk=2"}) {
    ASSERT_EQ(generate({"output_type=np", chunk}).status, 0);
    EXPECT_LE(largest_difference(whole, tensor("video.safetensors", "video")), 1e-5) << chunk;
  }
  const Outcome o = generate({"vae_decode_chunk=0"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "vae_decode_chunk is 0; expected -1 or at least 1")) << o.err;
}

// S2-11
TEST_F(Video, TakesItsTransformerFromAnotherFile) {
  ASSERT_EQ(generate({"output_type=latent"}, "a14b").status, 0);
  ASSERT_EQ(generate({"output_type=latent", "boundary_ratio=0"}, "a14b").status, 0);
  const HostArray high = tensor("latents.safetensors", "latents");
  const std::string file = kFolders + "a14b/transformer/diffusion_pytorch_model.safetensors";
  for (const std::string& place : {file, kFolders + "a14b", kFolders + "a14b/transformer"}) {
    const Outcome o = generate({"output_type=latent", "wan_transformer_pretrained_model_name_or_path=" + place});
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_LE(largest_difference(high, tensor("latents.safetensors", "latents")), 1e-5) << place;
  }
}

// P-17
TEST_F(Video, TakesItsAutoencoderFromAFileWithOriginalNames) {
  ASSERT_EQ(generate({"output_type=np"}).status, 0);
  const HostArray expected = tensor("video.safetensors", "video");
  const HostArrays weights = SafetensorsReader::open(kFolders + "t2v/vae").tensors();
  const auto write = [&](const std::string& file, double extra) {
    HostArrays changed = weights;
    const HostArray bias = weights.at("decoder.conv_out.bias").cast(DType::f32);
    HostArray other(bias.shape());
    std::ranges::transform(bias.view<float>(), other.mutable_view<float>().begin(),
                           [&](float v) { return v + static_cast<float>(extra); });
    changed["decoder.conv_out.bias"] = other;
    write_safetensors(t / "published.safetensors", changed);
    const Outcome o = maxdiffusion({"convert", t / "published.safetensors", t / file, "component=vae",
                                    "single_file_config=" + kFolders + "t2v", "format=single_file"});
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(SafetensorsReader::open(t / file).tensors().contains("decoder.middle.0.residual.0.gamma"));
  };
  write("same.safetensors", 0);
  write("other.safetensors", 0.25);
  ASSERT_EQ(generate({"output_type=np", "vae_file=" + (t / "same.safetensors")}).status, 0);
  EXPECT_EQ(largest_difference(expected, tensor("video.safetensors", "video")), 0);
  ASSERT_EQ(generate({"output_type=np", "vae_file=" + (t / "other.safetensors")}).status, 0);
  EXPECT_GT(largest_difference(expected, tensor("video.safetensors", "video")), 0.01);
}

// S2-55…57
TEST_F(Video, OfSizesThatTheModelCannotTakeIsRefusedWithTheNearest) {
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"num_frames=7"}, "num_frames is 7; expected 1 plus a multiple of 4: the nearest is 9"},
           {{"num_frames=0"}, "num_frames is 0"},
           {{"height=40"}, "size 40x48 is not a multiple of 16, as this model needs; the nearest is 48x48"},
           {{"output_type=gif"}, "output_type is `gif`, expected one of: png, mp4, np, latent"},
           {{"image=" + (t / "picture.png")}, "image: an image is given; expected a video"},
           {{"last_image=" + (t / "picture.png")}, "last_image is given without image"}}) {
    write_png(t / "picture.png", HostArray(Shape{DType::u8, {8, 8, 3}}));
    const Outcome o = generate(words);
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
}

TEST_F(Video, NeedsTheImagesThatItsModelNeeds) {
  Outcome o = generate({}, "i2v");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "image: empty; this model's videos begin with an image\n  try: image=FILE")) << o.err;
  write_png(t / "one.png", HostArray(Shape{DType::u8, {8, 8, 3}}));
  o = generate({"image_url=" + (t / "one.png")}, "flf2v");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "last_image: empty; this model's videos end with an image")) << o.err;
  o = generate({"image_url=" + (t / "one.png"), "last_image=" + (t / "one.png"), "num_inference_steps=1",
                "max_sequence_length=512"},
               "flf2v");
  EXPECT_EQ(o.status, 0) << o.err;
  const std::string one = t / "one.png";
  o = generate({"image=" + one + "," + one + "," + one}, "i2v");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "image, last_image: 3 images are given; this model's videos begin with one")) << o.err;
  o = generate({"image=" + one + "," + one, "last_image=" + one}, "flf2v");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "image, last_image: 3 images are given; this model's videos begin with one and may end"))
      << o.err;
  // Web addresses are downloaded, but not from this machine.
  o = generate({"image_url=http://127.0.0.1:9/one.png"}, "i2v");
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "image 'http://127.0.0.1:9/one.png': an address of this machine or of a private network"))
      << o.err;
}

/// A run on eight moving-emoji clips with the tiny folder.
class VideoTraining : public Video {
 protected:
  Outcome train(const std::string& name, const std::vector<std::string>& extra) {
    std::vector<std::string> words = {"train_wan", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=" + name};
    return run(words, extra);
  }
  Outcome run(std::vector<std::string> words, const std::vector<std::string>& extra) {
    const std::vector<std::string> rest = {"pretrained_model_name_or_path=" + kFolders + "t2v",
                                           "output_dir=" + t.path(),
                                           "max_sequence_length=12",
                                           "dataset_name=moving-emoji",
                                           "dataset_save_location=" + (t / "data"),
                                           "max_train_samples=8",
                                           "height=32",
                                           "width=32",
                                           "num_frames=5",
                                           "fps=8",
                                           "per_device_batch_size=2",
                                           "learning_rate=1e-3"};
    words.insert(words.end(), rest.begin(), rest.end());
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  /// Writes clips with these numbers of frames, all frames different, to the folder clips.
  void make_clips(const std::vector<int64_t>& frames) {
    make_folders(t / "clips");
    for (size_t i = 0; i < frames.size(); ++i) {
      HostArray clip(Shape{DType::u8, {frames[i], 32, 32, 3}});
      auto v = clip.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k)
        v[k] = static_cast<uint8_t>(k / 3072 * 20 + k / 96 % 32 * 3 + k / 3 % 32 * 2 + k % 3 * 20 + i * 9);
      write_mp4(t / fmt::format("clips/{}.mp4", i), clip, {.fps = 8});
      write_file_atomic(t / fmt::format("clips/{}.txt", i), fmt::format("clip {}", i));
    }
  }
  std::string weights(const std::string& name, int step) {
    return read_file(t / fmt::format("{}/checkpoints/{}/transformer/diffusion_pytorch_model.safetensors", name, step));
  }
};

// S2-79, S2-84
TEST_F(VideoTraining, SamplesAfterEachEvaluationAndComparesTheEndWithTheStart) {
  std::vector<std::string> words = {"eval_every=1",
                                    "eval_data_dir=" + (t / "data/moving-emoji-32-5-8"),
                                    "timesteps_list=[500]",
                                    "eval_max_number_of_samples_in_bucket=2",
                                    "prompt=a red heart",
                                    "num_inference_steps=2",
                                    "max_train_steps=2",
                                    "enable_ssim=true",
                                    "enable_generate_video_for_eval=true",
                                    "output_type=png",  // lossless
                                    "learning_rate=0"};
  Outcome o = train("still", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "SSIM score after training is 1.000000")) << o.err;
  EXPECT_TRUE(contains(o.err, "PSNR after training is inf dB")) << o.err;
  auto generated = [&](const std::string& run, int step) {
    HostArray frames(Shape{DType::u8, {5, 32, 32, 3}});
    for (int64_t i = 0; i < 5; ++i) {
      const std::string name = fmt::format("{}/samples/{}-train_steps-wan_output_0_0/{:04}.png", run, step, i);
      const HostArray frame = decode_image(t / name);
      set_block(frames, i, 0, frame.reshaped(batched(1, frame.shape()).dims));
    }
    return frames;
  };
  EXPECT_EQ(largest_difference(generated("still", 1), generated("still", 2)), 0);  // nothing is learned
  // TensorBoard shows the contents of the files as a GIF.
  const std::string shown = all_files(t / "still/tensorboard");
  EXPECT_TRUE(contains(shown, "eval_samples/0"));
  EXPECT_TRUE(contains(shown, encode_gif(generated("still", 1), 8)));
  words.back() = "learning_rate=1e-1";
  o = train("moved", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "SSIM score after training is 0.") || contains(o.err, "SSIM score after training is -0."))
      << o.err;
  EXPECT_GT(mean_difference(generated("moved", 1), generated("moved", 2)), 10);
  o = train("without", {"enable_generate_video_for_eval=true", "prompt=a", "max_train_steps=1"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "enable_generate_video_for_eval needs eval_every")) << o.err;
}

TEST_F(VideoTraining, MagCacheKnowsTheRatiosOfPublishedModels) {
  // A narrow model with the block and head counts of the 1.3B model.
  std::filesystem::copy(kFolders + "t2v", t / "narrow", std::filesystem::copy_options::recursive);
  auto config = parse_json(read_file(t / "narrow/transformer/config.json"));
  config["num_layers"] = 30, config["num_attention_heads"] = 12, config["attention_head_dim"] = 6;
  write_file_atomic(t / "narrow/transformer/config.json", config.dump());
  Outcome o = train("narrow_run", {"pretrained_model_name_or_path=" + (t / "narrow"), "train_new_unet=true",
                                   "dataset_name=", "dataset_type=synthetic", "max_train_steps=1", "scan_layers=true",
                                   "xla_flags=--xla_backend_optimization_level=0"});
  ASSERT_EQ(o.status, 0) << o.err;
  auto cached = [&](const std::string& ratios) {
    o = maxdiffusion({"generate", t / "narrow_run/config.yml", "prompt=a red heart", "num_inference_steps=10",
                      "guidance_scale=3", "use_magcache=true", "magcache_thresh=0.02", ratios});
    EXPECT_EQ(o.status, 0) << o.err;
    const size_t at = o.err.find("[MagCache] ");
    return at == std::string::npos ? o.err : o.err.substr(at, o.err.find(" steps", at) - at);
  };
  EXPECT_EQ(cached("mag_ratios_base="), "[MagCache] Cached 3/10");
  EXPECT_EQ(cached("mag_ratios_base=[1, 1]"), "[MagCache] Cached 6/10");  // two of three, after the first two
}

TEST_F(VideoTraining, AnAutoencoderOfSingleFramesBeginsWithVideosFrameByFrame) {
  const Outcome o = train("new", {"train_new_vae=true", "vae_image_pretrain_steps=2", "vae_max_train_steps=1",
                                  "vae_per_device_batch_size=2", "vae_learning_rate=1e-30", "max_train_steps=1"});
  ASSERT_EQ(o.status, 0) << o.err;
  auto weights_of = [&](const std::string& stage) {
    return SafetensorsReader::open(t / ("new/" + stage + "/vae/diffusion_pytorch_model.safetensors")).tensors();
  };
  const HostArrays frames = weights_of("vae_images/checkpoints/2"), videos = weights_of("checkpoints/1");
  int64_t kernels = 0, over_time = 0;
  for (const auto& [name, a] : videos) {
    const Dims& d = a.dims();
    if (d.size() != 5 || d[2] == 1) continue;
    const std::vector<double> v = a.to_doubles();
    const bool copies = d[3] == 1 && d[4] == 1;
    const std::vector<double> learned = copies ? std::vector<double>() : frames.at(name).to_doubles();
    for (size_t i = 0; i < v.size(); ++i) {
      const auto k = static_cast<int64_t>(i);
      const int64_t tap = k / (d[3] * d[4]) % d[2], in = k / (d[2] * d[3] * d[4]) % d[1],
                    out = k / (d[1] * d[2] * d[3] * d[4]);
      const double want = tap < d[2] - 1 ? 0 : copies ? static_cast<double>(out % d[1] == in) : learned[i];
      ASSERT_NEAR(v[i], want, 1e-20) << name;
    }
    ++(copies ? over_time : kernels);
  }
  EXPECT_GT(kernels, 10);
  EXPECT_EQ(over_time, 4);  // two levels halve the frame count, two double it
}

// S2-1, S2-46, S2-55…57, S2-77, S2-78, S2-120
TEST_F(VideoTraining, OnClipsEvaluatesResumesToTheBitAndIsSampled) {
  const std::vector<std::string> evaluated = {"eval_every=2", "eval_data_dir=" + (t / "data/moving-emoji-32-5-8"),
                                              "timesteps_list=[250, 750]", "eval_max_number_of_samples_in_bucket=3"};
  std::vector<std::string> four = evaluated;
  four.push_back("max_train_steps=4");
  Outcome o = train("whole", four);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "bucket 32x32x5: 8 clips")) << o.err;
  EXPECT_TRUE(contains(o.err, "Mean eval loss for timestep 750")) << o.err;
  EXPECT_TRUE(contains(o.err, "Calculated TFLOPs per pass:")) << o.err;

  ASSERT_EQ(train("stopped", {"max_train_steps=2"}).status, 0);
  ASSERT_EQ(train("stopped", {"max_train_steps=4"}).status, 0);
  EXPECT_EQ(weights("whole", 4), weights("stopped", 4));

  o = run({"generate_wan", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=whole"},
          {"prompt=a red heart moves up", "num_inference_steps=2"});
  // A model on the command line takes precedence over the run's.
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string bytes = read_file(t / "wan_output_0_0.mp4");
  o = maxdiffusion({"generate", t / "whole/config.yml", "prompt=a red heart moves up", "num_inference_steps=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "the run's checkpoint " + (t / "whole/checkpoints/4") + " is used")) << o.err;
  EXPECT_NE(read_file(t / "whole/wan_output_0_0.mp4"), bytes);
}

// S2-49, S2-50, S2-111, S2-112
TEST_F(VideoTraining, TrainsInTheStepAndFromTfrecordsAsFromTheCache) {
  auto losses = [&](const std::string& name, const std::vector<std::string>& extra) {
    const Outcome o = train(name, extra);
    EXPECT_EQ(o.status, 0) << o.err;
    std::vector<double> all;
    std::istringstream lines(read_file(t / (name + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) all.push_back(parse_json(line).at("loss"));
    return all;
  };
  const std::vector<double> cached = losses("cached", {"max_train_steps=2"}),
                            in_step =
                                losses("in_step", {"cache_latents_text_encoder_outputs=false", "max_train_steps=2"});
  ASSERT_EQ(cached.size(), 2u);
  ASSERT_EQ(in_step.size(), 2u);
  for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(in_step[i], cached[i], 1e-4 * cached[i]) << i;

  // S2-111, S2-112: the first file has five records, the next one the others.
  Outcome o = run({"wan_txt2vid_data_preprocessing", MD_SOURCE_DIR "/tests/pipelines/generate.yml"},
                  {"tfrecords_dir=" + (t / "records"), "no_records_per_shard=5"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "8 records")) << o.out;
  std::set<std::string> files;
  for (const auto& file : std::filesystem::directory_iterator(t / "records")) files.insert(file.path().filename());
  EXPECT_EQ(files, (std::set<std::string>{"file_00-5.tfrec", "file_01-10.tfrec"}));

  // S2-49, S2-50: records hold latents sampled from the cached distributions, and the cached embeddings.
  RunConfig c = RunConfig::load(
      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
      {"run_name=read", "output_dir=" + (t / "read"), "pretrained_model_name_or_path=" + kFolders + "t2v",
       "max_sequence_length=12", "dataset_name=moving-emoji", "dataset_save_location=" + (t / "data"),
       "max_train_samples=8", "height=32", "width=32", "num_frames=5", "fps=8"});
  const TrainingRequest r = training_request(c);
  ModelComponents models(r.components);
  const DataPlan data = plan_data(r.data, DataMode::cached_latents, r.run, *models.family());
  const CachedImages cache = encode_dataset(models, data.cache, open_source(prepare_source(data.source)), data.images);
  ASSERT_EQ(cache.images, 8);
  RecordStream records(open_source({.dataset_type = "tfrecord",
                                    .train_data_dir = t / "records",
                                    .array_columns = {"latents", "encoder_hidden_states"}}),
                       {.shuffle = false});
  double sum = 0, squares = 0, n = 0, farthest = 0;
  std::vector<double> of_first;  // first record
  int64_t equal_values = 0;      // equal values in the other records
  for (int64_t i = 0; i < 8; ++i) {
    const HostArrays record = records.next().read().arrays, from_cache = cache.buckets[0]->read(i);
    const HostArray& text = record.at("encoder_hidden_states");
    EXPECT_LE(largest_difference(text.reshaped(from_cache.at("prompt_embeds").dims()), from_cache.at("prompt_embeds")),
              1e-5)
        << i;
    const HostArray& latents = record.at("latents");
    ASSERT_EQ(latents.dims(), (Dims{4, 2, 4, 4}));
    const HostArray moments =
        models.family()->spec().autoencoder->latent_scale.apply_to_moments(from_cache.at("moments"));
    const std::vector<double> x = latents.to_doubles(), m = moments.to_doubles();
    ASSERT_EQ(m.size(), 2 * x.size());
    for (size_t channel = 0; channel < 4; ++channel)
      for (size_t place = 0; place < 32; ++place) {
        const double mean = m[place * 8 + channel], deviation = m[place * 8 + 4 + channel],
                     z = (x[channel * 32 + place] - mean) / deviation;
        sum += z, squares += z * z, ++n, farthest = std::max(farthest, std::abs(z));
        if (i == 0) of_first.push_back(z);
        if (i > 0) equal_values += std::abs(z - of_first[channel * 32 + place]) < 0.01;
      }
  }
  EXPECT_LE(equal_values, 20);  // of 896; 5 are expected by chance
  // For 1024 standard normal values: four deviations of their mean and of their variance.
  EXPECT_LE(std::abs(sum / n), 4 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2 / n));
  EXPECT_LE(farthest, 5);

  // Records hold the text length, so the key has no effect.
  const std::vector<std::string> words = {"dataset_type=tfrecord", "dataset_name=", "train_data_dir=" + (t / "records"),
                                          "max_train_steps=2"};
  std::vector<std::string> others = words;
  others.push_back("max_sequence_length=9");
  const std::vector<double> from_records = losses("from_records", words);
  ASSERT_EQ(from_records.size(), 2u);
  EXPECT_EQ(losses("of_others", others), from_records);
}

// S2-29, S2-54
TEST_F(VideoTraining, ABatchHasTheRowsAndSizesOfItsKeys) {
  auto batch = [&](const std::vector<std::string>& extra) {
    std::vector<std::string> words = {"inspect",
                                      "batch",
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "run_name=batch",
                                      "pretrained_model_name_or_path=" + kFolders + "t2v",
                                      "output_dir=" + t.path(),
                                      "dataset_name=moving-emoji",
                                      "max_sequence_length=12",
                                      "num_frames=5",
                                      "per_device_batch_size=2"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.out;
  };
  // S2-54: height and width, if they have no keys.
  const std::string plain = batch({"resolution=48"});
  EXPECT_TRUE(contains(plain, "moments f32[2,2,6,6,8]")) << plain;
  const std::string sides = batch({"resolution=48", "height=32", "width=64"});
  EXPECT_TRUE(contains(sides, "moments f32[2,2,4,8,8]")) << sides;
  // S2-29: instead of the per-device batch.
  const std::string global = batch({"resolution=48", "global_batch_size=6", "cpu_device_count=4",
                                    "ici_data_parallelism=1", "ici_fsdp_parallelism=4"});
  EXPECT_TRUE(contains(global, "moments f32[6,2,6,6,8]") && contains(global, "prompt_embeds f32[6,12,16]")) << global;
}

// S2-57
TEST_F(VideoTraining, GivesEachClipTheMostFramesOfTheListThatItHas) {
  make_clips({10, 10, 10, 6, 6, 6, 2});
  const std::vector<std::string> words = {"dataset_name=", "train_data_dir=" + (t / "clips")};
  auto with = [&](std::vector<std::string> extra) {
    extra.insert(extra.end(), words.begin(), words.end());
    return extra;
  };
  Outcome o = train("mixed", with({"frame_buckets=[9,5]", "max_train_steps=3"}));
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* message : {"bucket 32x32x5: 3 clips", "bucket 32x32x9: 3 clips", "6 clips, 1 skipped",
                              "6.mp4: 2 frames; expected at least 5", "train transformer 32x32x5: program",
                              "train transformer 32x32x9: program"})
    EXPECT_TRUE(contains(o.err, message)) << message << "\n" << o.err;
  ASSERT_EQ(train("parts", with({"frame_buckets=[9,5]", "max_train_steps=2"})).status, 0);
  ASSERT_EQ(train("parts", with({"frame_buckets=[9,5]", "max_train_steps=3"})).status, 0);
  EXPECT_EQ(weights("mixed", 3), weights("parts", 3));
  o = train("refused", with({"frame_buckets=[5,7]"}));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "num_frames is 7") && contains(o.err, "in frame_buckets: 7")) << o.err;
  o = train("refused", with({"frame_buckets=[5]", "train_new_vae=true"}));
  EXPECT_TRUE(contains(o.err, "train_new_vae cannot be combined with frame_buckets")) << o.err;
}

/// Trains a tiny image-to-video model.
class ImageTraining : public VideoTraining {
 protected:
  Outcome train(const std::string& name, const std::string& folder, std::vector<std::string> extra) {
    for (const std::string& word : {"pretrained_model_name_or_path=" + kFolders + folder, std::string("dataset_name="),
                                    "train_data_dir=" + (t / "clips")})
      extra.insert(extra.begin(), word);
    return VideoTraining::train(name, extra);
  }
};

// S2-1
TEST_F(ImageTraining, FromClipsResumesToTheBitAndIsEvaluated) {
  make_clips({5, 5, 6, 5});
  Outcome o = train("whole", "i2v",
                    {"eval_every=2", "eval_data_dir=" + (t / "clips"), "timesteps_list=[500]",
                     "eval_max_number_of_samples_in_bucket=2", "max_train_steps=4"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "Mean eval loss for timestep 500")) << o.err;
  ASSERT_EQ(train("stopped", "i2v", {"max_train_steps=2"}).status, 0);
  ASSERT_EQ(train("stopped", "i2v", {"max_train_steps=4"}).status, 0);
  EXPECT_EQ(weights("whole", 4), weights("stopped", 4));
  o = train("in_step", "i2v", {"cache_latents_text_encoder_outputs=false"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "this model is conditioned on images")) << o.err;
  o = train("made", "i2v", {"dataset_type=synthetic", "train_data_dir=", "max_train_steps=1"});
  EXPECT_EQ(o.status, 0) << o.err;
}

// S2-1
TEST_F(ImageTraining, TakesTheFramesOfAClipAsGenerateTakesImages) {
  make_clips({5, 6, 7});
  for (const auto& [folder, images] : {std::pair{"i2v", 1}, {"flf2v", 2}}) {
    const std::string model = kFolders + folder;
    RunConfig c =
        RunConfig::load(MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                        {"run_name=cached", "output_dir=" + (t / folder), "pretrained_model_name_or_path=" + model,
                         "max_sequence_length=12", "dataset_name=moving-emoji", "dataset_save_location=" + (t / "data"),
                         "max_train_samples=3", "height=32", "width=32", "num_frames=5", "fps=8", "random_flip=true"});
    const TrainingRequest r = training_request(c);
    ModelComponents models(r.components);
    const DataPlan data = plan_data(r.data, DataMode::cached_latents, r.run, *models.family());
    const ImageConfig& config = data.images;
    const auto source = open_source(prepare_source(data.source));
    const CachedImages cached = encode_dataset(models, data.cache, source, config);
    ASSERT_EQ(cached.images, 3);
    const HostArray pixels = load_images(source, config).pixels, turned = mirrored(pixels);
    ImageConditioner generate(models.devices(), models.family(), models.weights_of(), models.media_autoencoder(),
                              scope_options(c.layers), c.compile);
    for (int64_t i = 0; i < 3; ++i)
      for (const auto& [prefix, all] : {std::pair{"", &pixels}, {"mirrored.", &turned}}) {
        const HostArray clip = row_of(*all, i);
        std::vector<HostArray> frames = {row_of(clip, 0)};
        if (images == 2) frames.push_back(row_of(clip, 4));
        const HostArrays expected = generate.encode({frames}, {32, 32, 5}), found = cached.buckets[0]->read(i);
        ASSERT_EQ(expected.size(), 2u);
        for (const auto& [name, a] : expected) {
          const HostArray saved = found.at(prefix + name);
          ASSERT_EQ(saved.dims(), row_of(a, 0).dims());
          EXPECT_LE(largest_difference(saved, row_of(a, 0)), 1e-5) << folder << " " << name << " " << i;
        }
      }
  }
}

// Wan's denoiser reads zeros behind the text, and UMT5 masks padding.
TEST(WanText, IsEncodedAtTheNextLengthOfProgramsAndZeroPadded) {
  const OpenedModel model = open_model(kFolders + "t2v", {.max_sequence_length = 300}, {.purpose = Purpose::sampling});
  std::vector<std::string> programs;
  CompileConfig compile;
  compile.uses = [&](const std::string& name) { programs.push_back(name); };
  TextEncoder encoder(one_device(), model.family, 1,
                      [&](const ParamTable& params, const std::string& c) { return model.weights.read(params, c); }, {},
                      compile, {});
  std::string many;
  for (int i = 0; i < 12; ++i) many += "red heart ";
  size_t lengths = 0;
  for (const std::string& caption : {std::string("a red heart"), many}) {
    const HostArrays tokens = model.family->tokenize({caption}, {});
    const auto mask = tokens.at("mask").to_doubles();
    const auto used = static_cast<int64_t>(std::ranges::count(mask, 1.0));
    const HostArray found = encoder.encode({caption}).at("prompt_embeds"),
                    whole = encoder.encode_tokens(tokens).at("prompt_embeds");  // of all 300 tokens
    ASSERT_EQ(found.dims(), whole.dims());
    EXPECT_EQ(found.dims()[1], 300);
    const std::vector<double> a = found.to_doubles(), b = whole.to_doubles();
    const auto rest = static_cast<size_t>(used * found.dims()[2]);
    for (size_t i = 0; i < a.size(); ++i) {
      const double tolerance = i < rest ? 2e-6 : 0;  // sums of another number of zeros
      ASSERT_NEAR(a[i], i < rest ? b[i] : 0, tolerance) << used << " tokens, at " << i;
    }
    EXPECT_EQ(encoder.encode({caption + " !"}).size(), 1U);
    EXPECT_EQ(programs.size(), lengths + (lengths == 0 ? 2U : 1U)) << used << " tokens: their length, and all 300";
    lengths = programs.size();
  }
}

}  // namespace
}  // namespace md
