// Samples of Wan that begin with a video, compared with diffusers (tools/golden/video_to_video.py).
#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/write_video.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kWan = kGoldens + "wan/t2v";

const SafetensorsReader& golden() {
  static const SafetensorsReader file = SafetensorsReader::open(kGoldens + "video_to_video/golden.safetensors");
  return file;
}

/// [N, C, …] → [N, …, C].
HostArray channels_last(const HostArray& a) {
  Dims d = a.dims();
  const int64_t c = d[1];
  int64_t cells = 1;
  for (size_t i = 2; i < d.size(); ++i) cells *= d[i];
  std::rotate(d.begin() + 1, d.begin() + 2, d.end());
  HostArray out(Shape{DType::f32, d});
  const auto from = a.view<float>();
  auto to = out.mutable_view<float>().begin();
  for (int64_t n = 0; n < d[0]; ++n)
    for (int64_t i = 0; i < cells; ++i)
      for (int64_t k = 0; k < c; ++k) *to++ = from[static_cast<size_t>((n * c + k) * cells + i)];
  return out;
}

TEST(VideoToVideo, BeginsAsInDiffusers) {
  PipelineOptions options;
  options.layers.activations_dtype = "float32", options.layers.precision = "HIGHEST";
  options.encoders.vae_dtype = "float32";
  options.compile.xla_flags = "--xla_backend_optimization_level=0";
  options.model.max_sequence_length = 12;
  DiffusionPipeline pipeline = DiffusionPipeline::load(kWan, options);
  for (const std::string name : {"unipc", "euler"}) {
    SampleRequest r;
    r.prompt = {"a red heart"};
    r.images = {golden().tensors().at("video")};
    r.height = 32, r.width = 48, r.num_inference_steps = 5, r.guidance_scale = 3;
    r.latents = channels_last(golden().tensors().at(name + ".noise"));
    r.strength = name == "unipc" ? 0.6 : 0.8;
    if (name == "euler") {
      r.negative_prompt = {"grey"};
      r.scheduler.diffusion_scheduler_config = {{"_class_name", R"("FlowMatchEulerDiscreteScheduler")"},
                                                {"shift", "3.0"}};
    }
    const SampleResult result = pipeline.generate(r);
    const HostArray want = channels_last(golden().tensors().at(name + ".latents"));
    ASSERT_EQ(result.latents.dims(), want.dims());
    EXPECT_EQ(result.media.dims()[1], 9);
    const auto a = result.latents.view<float>(), b = want.view<float>();
    double difference = 0, size = 0;
    for (size_t i = 0; i < b.size(); ++i) difference += std::pow(a[i] - b[i], 2), size += std::pow(b[i], 2);
    EXPECT_LT(std::sqrt(difference / size), 2e-5) << name;
  }
}

TEST(VideoToVideo, IsOfAFileAndRefusesOthers) {
  TemporaryFolder t;
  const HostArray& video = golden().tensors().at("video");
  write_file_atomic(t / "clip.mp4", encode_mp4(video, {}, "clip.mp4"));
  auto run = [&](std::vector<std::string> words, const std::string& folder = kWan) {
    words.insert(words.begin(), {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                 "pretrained_model_name_or_path=" + folder, "output_dir=" + (t / "out"),
                                 "num_inference_steps=4", "max_sequence_length=12", "prompt=a red heart"});
    return maxdiffusion(words);
  };
  const std::string clip = "image=" + (t / "clip.mp4");
  Outcome o = run({clip, "strength=0.5", "output_type=latent"});
  ASSERT_EQ(o.status, 0) << o.err;
  const Dims dims = SafetensorsReader::open(t / "out/latents.safetensors").tensors().at("latents").dims();
  EXPECT_EQ(dims, golden().tensors().at("unipc.latents").dims());
  for (const auto& [words, folder, message] :
       std::vector<std::tuple<std::vector<std::string>, std::string, std::string>>{
           {{clip, "num_frames=13"}, kWan, "image has 9 frames; expected num_frames=13 or more"},
           {{clip, "hires_scale=2"}, kWan, "hires_scale is 2; expected 1: this model"},
           {{clip, "outpaint=8,0,0,0"}, kWan, "expected none: this model's media are videos"},
           {{clip}, kGoldens + "pipelines/sd", "image: a video is given; expected an image"}}) {
    o = run(words, folder);
    EXPECT_EQ(o.status, 2) << message;
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
}

}  // namespace
}  // namespace md
