// Previews between steps and tiny autoencoders, compared with what diffusers' pipelines predict
// (tools/golden/previews.py, tools/golden/tiny_autoencoders.py).
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

/// [N, C, (F,) h, w] → [N, (F,) h, w, C].
HostArray channels_last(const HostArray& a) {
  Dims dims = a.dims();
  const int64_t n = dims[0], c = dims[1], cells = a.shape().elements() / n / c;
  dims.erase(dims.begin() + 1);
  dims.push_back(c);
  HostArray out(Shape{DType::f32, dims});
  const auto from = a.view<float>();
  auto to = out.mutable_view<float>().begin();
  for (int64_t i = 0; i < n; ++i)
    for (int64_t cell = 0; cell < cells; ++cell)
      for (int64_t k = 0; k < c; ++k) *to++ = from[static_cast<size_t>((i * c + k) * cells + cell)];
  return out;
}

/// The largest difference of image `i` of a golden batch, in levels.
int difference(const HostArray& rgb, const HostArray& batch, int64_t i) {
  const auto a = rgb.view<uint8_t>(), b = batch.view<uint8_t>();
  EXPECT_EQ(rgb.dims(), (Dims{batch.dims()[1], batch.dims()[2], 3}));
  int most = 0;
  for (size_t k = 0; k < a.size(); ++k)
    most = std::max(most, std::abs(a[k] - b[static_cast<size_t>(i) * a.size() + k]));
  return most;
}

/// The largest difference of media in [−1, 1] from a golden in [0, 1].
double difference_of_media(const HostArray& media, const HostArray& golden) {
  EXPECT_EQ(media.dims(), golden.dims());
  const auto got = media.view<float>(), want = golden.view<float>();
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i)
    worst = std::max(worst, std::abs(std::clamp(got[i] / 2.0 + 0.5, 0.0, 1.0) - static_cast<double>(want[i])));
  return worst;
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
  EXPECT_LT(difference_of_media(result.media, golden().at(c.name + ".images")), 2e-4);
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

// Files that are published without a config.json: TAEW2.1, TAEW2.2 and TAEF2.
struct Published {
  std::string name, folder, file;
  int64_t height = 32, width = 48;
};
void PrintTo(const Published& p, std::ostream* os) { *os << p.name; }

class PublishedTiny : public testing::TestWithParam<Published> {
 protected:
  static const HostArray& array(const std::string& name) {
    static const SafetensorsReader file = SafetensorsReader::open(kPreviews + "tiny.safetensors");
    return file.tensors().at(GetParam().name + "." + name);
  }
  static bool videos() { return GetParam().name.starts_with("wan"); }
  static PipelineOptions options() {
    PipelineOptions o;
    o.layers.activations_dtype = "float32", o.layers.precision = "HIGHEST";
    o.encoders.vae_dtype = "float32";
    o.compile.xla_flags = "--xla_backend_optimization_level=0";
    if (videos()) o.model.max_sequence_length = 12;
    if (GetParam().name == "flux2") o.model.text_encoder_out_layers = {1, 2, 3};
    return o;
  }
  static SampleRequest request() {
    SampleRequest r;
    r.prompt = {"a red heart"};
    r.num_inference_steps = 3, r.height = GetParam().height, r.width = GetParam().width;
    if (GetParam().name != "qwen_image") r.guidance_scale = 4;
    if (videos()) {
      r.negative_prompt = {"grey"}, r.num_frames = 9;
      r.scheduler.diffusion_scheduler_config = {{"_class_name", R"("FlowMatchEulerDiscreteScheduler")"}};
      r.scheduler.flow_shift = 3;
    }
    r.latents = channels_last(array("noise"));
    return r;
  }
};

TEST_P(PublishedTiny, DecodesInPlaceOfTheModels) {
  PipelineOptions o = options();
  o.model.vae_file = kPreviews + GetParam().file;
  for (const int64_t chunk : {1, 2, -1}) {
    if (chunk != 1 && !videos()) continue;
    o.media_chunks.vae_decode_chunk = chunk;
    const SampleResult result = DiffusionPipeline::load(kGoldens + GetParam().folder, o).generate(request());
    EXPECT_LT(difference_of_media(result.media, array("images")), 2e-4) << chunk;
  }
}

TEST_P(PublishedTiny, DecodesPreviews) {
  PipelineOptions o = options();
  o.added.preview_autoencoder = kPreviews + GetParam().file;
  if (!videos()) o.model.vae_file = o.added.preview_autoencoder;  // the golden folder's autoencoder has other sizes
  SampleRequest r = request();
  r.preview_every = 1;
  int64_t step = 0;
  r.preview = [&](const SamplePreview& p) {
    ASSERT_EQ(p.images.size(), 1u);
    EXPECT_LE(difference(p.images[0], array(fmt::format("tiny.{}", step++)), 0), 1) << "step " << step - 1;
  };
  DiffusionPipeline::load(kGoldens + GetParam().folder, o).generate(r);
  EXPECT_EQ(step, 2);
}

INSTANTIATE_TEST_SUITE_P(Goldens, PublishedTiny,
                         testing::Values(Published{"wan", "wan/t2v", "taew2_1.safetensors", 32, 16},
                                         Published{"wan_patched", "wan/ti2v", "taew2_2.safetensors", 32, 64},
                                         Published{"qwen_image", "qwenimage/base", "taew2_1_images.safetensors"},
                                         Published{"flux2", "flux2/base", "taef2.safetensors"}),
                         [](const auto& info) { return info.param.name; });

TEST(PublishedTinyFiles, OfVideosEncodeThemWhole) {
  PipelineOptions o;
  o.model.max_sequence_length = 12, o.model.vae_file = kPreviews + "taew2_1.safetensors";
  SampleRequest r;
  r.prompt = {"a red heart"}, r.num_inference_steps = 3, r.strength = 0.7, r.decode = false;
  HostArray video(Shape{DType::u8, {9, 32, 16, 3}});
  for (size_t i = 0; i < video.bytes(); ++i) video.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i * 7 % 251);
  r.images = {video};
  std::vector<std::vector<double>> latents;
  for (const int64_t chunk : {4, -1}) {
    o.media_chunks.vae_encode_chunk = chunk;
    latents.push_back(DiffusionPipeline::load(kGoldens + "wan/t2v", o).generate(r).latents.to_doubles());
  }
  EXPECT_EQ(latents[0], latents[1]);
  EXPECT_EQ(latents[0].size(), static_cast<size_t>(3 * 4 * 2 * 4));
}

TEST(PublishedTinyFiles, ThatDoNotFitAreRefusedByWhatIsExpected) {
  TemporaryFolder t;
  const auto refusal = [&](const std::string& folder, const std::string& key, const std::string& file) {
    const Outcome o = maxdiffusion({"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                    "pretrained_model_name_or_path=" + kGoldens + folder, "output_dir=" + (t / "out"),
                                    "prompt=a", "preview_every=1", key + "=" + file});
    EXPECT_TRUE(o.status == 2 || o.status == 4) << o.err;
    return o.err;
  };
  const std::string taew = kPreviews + "taew2_1.safetensors";
  const std::string other = refusal("wan/ti2v", "preview_autoencoder", taew);
  EXPECT_TRUE(contains(other, "decodes latents of 4 channels to images 8 times as large; expected 6 and 16")) << other;
  const std::string images = refusal("wan/t2v", "preview_autoencoder", kPreviews + "taesd");
  EXPECT_TRUE(contains(images, "is of images; expected one of videos, as in taew2_1.safetensors")) << images;
  const std::string none = refusal("pipelines/sd", "preview_autoencoder", kGoldens + "upscalers/x4.safetensors");
  EXPECT_TRUE(contains(none, "is another model's file; expected a tiny autoencoder's")) << none;
  for (const char* key : {"preview_autoencoder", "vae_file"}) {
    write_file_atomic(t / "taew2_1.pth", std::string("PK\3\4") + std::string(60, '\0'));
    const std::string pickled = refusal("wan/t2v", key, t / "taew2_1.pth");
    EXPECT_TRUE(contains(pickled, "taew2_1.pth")) << pickled;
    EXPECT_TRUE(contains(pickled, "safetensors")) << pickled;
  }
}

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
  EXPECT_TRUE(contains(o.err, "the folder holds no diffusion_pytorch_model.safetensors")) << o.err;
  o = run({"preview_every=-1"});
  EXPECT_EQ(o.status, 2);
}

}  // namespace
}  // namespace md
