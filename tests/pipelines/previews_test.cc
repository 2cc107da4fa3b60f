// Previews between steps and tiny autoencoders, compared with what diffusers' pipelines predict
// (tools/golden/previews.py).
#include <gtest/gtest.h>

#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kPreviews = kGoldens + "previews/",
                  kSd = kGoldens + "pipelines/sd";

const HostArrays& golden() {
  static const SafetensorsReader file = SafetensorsReader::open(kPreviews + "golden.safetensors");
  return file.tensors();
}

struct Case {
  std::string name, folder, tiny;
  std::map<std::string, std::string> scheduler = {};
  int64_t steps = 4, height = 16, width = 24;
};
void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

class Previews : public testing::TestWithParam<Case> {
 protected:
  static PipelineOptions options(const Case& c) {
    PipelineOptions o;
    o.layers.activations_dtype = "float32", o.layers.precision = "HIGHEST";
    o.encoders.vae_dtype = "float32";
    o.compile.xla_flags = "--xla_backend_optimization_level=0";
    if (c.name == "flux") o.model.max_sequence_length = 24;
    o.batch.per_device = 2;
    return o;
  }
  static SampleRequest request(const Case& c) {
    SampleRequest r;
    r.prompt = {"a red heart"}, r.num_images_per_prompt = 2;
    r.num_inference_steps = c.steps, r.height = c.height, r.width = c.width;
    if (c.name == "flux") r.guidance_scale = 3.5;
    r.scheduler.diffusion_scheduler_config = c.scheduler;
    r.latents = channels_last(golden().at(c.name + ".noise"));
    return r;
  }
  /// [N, C, h, w] → [N, h, w, C].
  static HostArray channels_last(const HostArray& a) {
    const Dims& d = a.dims();
    HostArray out(Shape{DType::f32, {d[0], d[2], d[3], d[1]}});
    const auto from = a.view<float>();
    auto to = out.mutable_view<float>().begin();
    for (int64_t n = 0; n < d[0]; ++n)
      for (int64_t i = 0; i < d[2] * d[3]; ++i)
        for (int64_t k = 0; k < d[1]; ++k) *to++ = from[static_cast<size_t>((n * d[1] + k) * d[2] * d[3] + i)];
    return out;
  }
  /// The largest difference of image `i` of a golden batch, in levels.
  static int difference(const HostArray& rgb, const HostArray& batch, int64_t i) {
    const auto a = rgb.view<uint8_t>(), b = batch.view<uint8_t>();
    EXPECT_EQ(rgb.dims(), (Dims{batch.dims()[1], batch.dims()[2], 3}));
    int most = 0;
    for (size_t k = 0; k < a.size(); ++k)
      most = std::max(most, std::abs(a[k] - b[static_cast<size_t>(i) * a.size() + k]));
    return most;
  }
};

TEST_P(Previews, AreWhatDiffusersPredictsWithoutNoise) {
  const Case& c = GetParam();
  for (const bool tiny : {true, false}) {
    PipelineOptions o = options(c);
    if (tiny) o.added.preview_autoencoder = kPreviews + c.tiny;
    DiffusionPipeline pipeline = DiffusionPipeline::load(kGoldens + c.folder, o);
    SampleRequest r = request(c);
    r.preview_every = 1;
    int64_t step = 0;
    r.preview = [&](const SamplePreview& p) {
      EXPECT_EQ(p.first, 0);
      ASSERT_EQ(p.images.size(), 2u);
      const HostArray& want = golden().at(fmt::format("{}.{}.{}", c.name, tiny ? "tiny" : "linear", step++));
      for (int64_t i = 0; i < 2; ++i)
        EXPECT_LE(difference(p.images[static_cast<size_t>(i)], want, i), 1) << "step " << step - 1;
    };
    const SampleResult with = pipeline.generate(r);
    EXPECT_EQ(step, c.steps - 1);  // after the last step there is the image
    r.preview_every = 2, step = 0;
    int64_t count = 0;
    r.preview = [&](const SamplePreview&) { ++count; };
    pipeline.generate(r);
    EXPECT_EQ(count, (c.steps - 1) / 2);
    r.preview_every = 0;
    const SampleResult without = pipeline.generate(r);
    EXPECT_EQ(count, (c.steps - 1) / 2);
    const auto a = with.latents.view<float>(), b = without.latents.view<float>();
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
    EXPECT_LT(most, 1e-4);
  }
}

TEST_P(Previews, TinyAutoencodersDecodeInPlaceOfTheModels) {
  const Case& c = GetParam();
  PipelineOptions o = options(c);
  o.model.vae_file = kPreviews + c.tiny;
  const SampleResult result = DiffusionPipeline::load(kGoldens + c.folder, o).generate(request(c));
  const auto want = golden().at(c.name + ".images").view<float>(), got = result.media.view<float>();
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i)
    worst = std::max(worst, std::abs(std::clamp(got[i] / 2.0 + 0.5, 0.0, 1.0) - static_cast<double>(want[i])));
  EXPECT_LT(worst, 2e-4);
}

INSTANTIATE_TEST_SUITE_P(
    Goldens, Previews,
    testing::Values(Case{"ddim", "pipelines/sd", "taesd", {{"_class_name", R"("DDIMScheduler")"}}},
                    Case{"euler", "pipelines/sd", "taesd", {{"_class_name", R"("EulerDiscreteScheduler")"}}},
                    Case{"euler_v",
                         "pipelines/sd",
                         "taesd",
                         {{"_class_name", R"("EulerDiscreteScheduler")"}, {"prediction_type", R"("v_prediction")"}}},
                    Case{"ddim_x0",
                         "pipelines/sd",
                         "taesd",
                         {{"_class_name", R"("DDIMScheduler")"}, {"prediction_type", R"("sample")"}}},
                    Case{"flux", "flux/dev", "taef1", {}, 3, 32, 48}),
    [](const auto& info) { return info.param.name; });

TEST(PreviewFiles, AreWrittenWhileGenerating) {
  TemporaryFolder t;
  const std::vector<std::string> words = {"generate",
                                          MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                          "pretrained_model_name_or_path=" + kSd,
                                          "output_dir=" + (t / "out"),
                                          "prompt=a red heart",
                                          "num_inference_steps=4",
                                          "height=16",
                                          "width=24"};
  auto run = [&](std::vector<std::string> extra) {
    extra.insert(extra.begin(), words.begin(), words.end());
    return maxdiffusion(extra);
  };
  Outcome o = run({"preview_every=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  // In a frame of six pixels.
  EXPECT_EQ(decode_image(t / "out/preview.png").dims(), (Dims{8 + 12, 12 + 12, 3}));
  EXPECT_FALSE(contains(read_file(t / "out/image_0.png"), "preview_every"));
  o = run({"preview_every=2", "preview_autoencoder=" + kPreviews + "taesd"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(decode_image(t / "out/preview.png").dims(), (Dims{16 + 12, 24 + 12, 3}));
  o = run({"preview_every=2", "preview_autoencoder=" + kPreviews + "taef1"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "decodes latents of 16 channels to images 2 times as large; expected 4 and 2")) << o.err;
  o = run({"preview_every=2", "preview_autoencoder=" + kSd});
  EXPECT_NE(o.status, 0);
  EXPECT_TRUE(contains(o.err, "config.json")) << o.err;
  o = run({"preview_every=-1"});
  EXPECT_EQ(o.status, 2);
}

}  // namespace
}  // namespace md
