// ESRGAN's network compared with PyTorch (tools/golden/upscalers.py), and what enlarges with it: upscale and
// hires_scale.
#include "maxdiffusion/pipelines/upscaling.h"

#include <gtest/gtest.h>

#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kUpscalers = kGoldens + "upscalers/",
                  kSd = kGoldens + "pipelines/sd";

const HostArrays& golden() {
  static const SafetensorsReader file = SafetensorsReader::open(kUpscalers + "golden.safetensors");
  return file.tensors();
}

int difference(const HostArray& a, const HostArray& b) {
  EXPECT_EQ(a.dims(), b.dims());
  if (a.dims() != b.dims()) return 256;
  int most = 0;
  for (size_t i = 0; i < a.view<uint8_t>().size(); ++i)
    most = std::max(most, std::abs(a.view<uint8_t>()[i] - b.view<uint8_t>()[i]));
  return most;
}

/// The network of a file on one device.
struct Network {
  explicit Network(const std::string& name, int64_t tile = 0) {
    AddedModelKeys added;
    added.upscaler = kUpscalers + name + ".safetensors";
    opened.emplace(open_model(kSd, {}, {.purpose = Purpose::sampling, .added = added}));
    devices.emplace(open_devices(HardwareKeys{}, MeshConfig{}, ShardingKeys{}, ""));
    ScopeOptions scope;
    scope.precision = Precision::highest;
    EncoderKeys keys;
    keys.vae_dtype = "float32";
    const auto facts = opened->folder.autoencoder("upscaler");
    coder.emplace(*devices, facts, opened->weights.read(opened->folder.params("upscaler"), "upscaler"), 1, scope,
                  CompileConfig{}, keys);
    upscaler.emplace(Upscaler{facts, *coder, tile});
  }
  std::optional<OpenedModel> opened;
  std::optional<Devices> devices;
  std::optional<MediaAutoencoder> coder;
  std::optional<Upscaler> upscaler;
};

class Upscalers : public testing::TestWithParam<const char*> {};

TEST_P(Upscalers, EnlargeAsPyTorchDoes) {
  const HostArray &image = golden().at("image"), &want = golden().at(GetParam());
  const Network n(GetParam());
  EXPECT_LE(difference(enlarged(image, want.dims()[0], want.dims()[1], &*n.upscaler), want), 1);
}
INSTANTIATE_TEST_SUITE_P(Goldens, Upscalers, testing::Values("x4", "x2", "x4_old", "x2_old", "x4_trunk"));

TEST(Upscaling, InTilesEqualsTheWholeAwayFromTheirEdges) {
  const HostArray &image = golden().at("image"), &want = golden().at("x4");
  const Network n("x4", 16);
  const HostArray got = enlarged(image, want.dims()[0], want.dims()[1], &*n.upscaler);
  ASSERT_EQ(got.dims(), want.dims());
  // The first tile's corner, farther from its edges than the network's first layers look.
  EXPECT_LE(difference(crop_rgb8(got, 0, 0, 8, 8), crop_rgb8(want, 0, 0, 8, 8)), 3);
  double sum = 0;
  for (size_t i = 0; i < want.view<uint8_t>().size(); ++i)
    sum += std::abs(got.view<uint8_t>()[i] - want.view<uint8_t>()[i]);
  EXPECT_LT(sum / static_cast<double>(want.view<uint8_t>().size()), 8);
}

TEST(Upscaling, OfOddSidesAndAnyFactor) {
  const HostArray image = crop_rgb8(golden().at("image"), 0, 0, 17, 25);
  const Network n("x2");  // takes even sides
  // As the image whose last row and column are repeated.
  HostArray even(Shape{DType::u8, {18, 26, 3}});
  for (size_t i = 0; i < even.bytes(); ++i)
    even.mutable_view<uint8_t>()[i] =
        image.view<uint8_t>()[(std::min<size_t>(i / 78, 16) * 25 + std::min<size_t>(i / 3 % 26, 24)) * 3 + i % 3];
  const HostArray got = enlarged(image, 34, 50, &*n.upscaler);
  ASSERT_EQ(got.dims(), (Dims{34, 50, 3}));
  EXPECT_EQ(difference(got, crop_rgb8(enlarged(even, 36, 52, &*n.upscaler), 0, 0, 34, 50)), 0);
  EXPECT_EQ(enlarged(image, 51, 75, &*n.upscaler).dims(), (Dims{51, 75, 3}));  // twice by two, then smaller
  EXPECT_EQ(difference(enlarged(image, 51, 75, nullptr), resize_rgb8(image, 51, 75, Filter::lanczos)), 0);
}

TEST(Upscaling, OfLatentsIsBilinearAsTorchDoesIt) {
  const HostArray got = resized_latents(golden().at("latents"), 7, 9);
  const auto a = got.view<float>(), b = golden().at("latents.up").view<float>();
  ASSERT_EQ(got.dims(), golden().at("latents.up").dims());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 2e-6);
}

class UpscalingCommand : public testing::Test {
 protected:
  Outcome generate(std::vector<std::string> words) {
    std::filesystem::remove_all(t / "out");
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + kSd,
                  "output_dir=" + (t / "out"), "prompt=a red heart", "num_inference_steps=4", "height=16", "width=24",
                  "scheduler=euler", "vae_dtype=float32"});
    return maxdiffusion(words);
  }
  HostArray pixels(const std::vector<std::string>& words) {
    const Outcome o = generate(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return decode_image(t / "out/image_0.png");
  }
  std::string text() { return read_file(t / "out/image_0.png"); }
  const std::string upscaler = "upscaler=" + kUpscalers + "x4.safetensors";
  TemporaryFolder t;
};

TEST_F(UpscalingCommand, EnlargesFinishedImages) {
  const HostArray small = pixels({});
  const Network n("x4", 192);
  EXPECT_LE(difference(pixels({upscaler, "upscale=4"}), enlarged(small, 64, 96, &*n.upscaler)), 2);
  EXPECT_TRUE(contains(text(), "Postprocess upscale by: 4, Postprocess upscaler: x4, ")) << text();
  EXPECT_EQ(difference(pixels({"upscale=1.5"}), enlarged(small, 24, 36, nullptr)), 0);
  EXPECT_TRUE(contains(text(), "Postprocess upscale by: 1.5, Postprocess upscaler: Lanczos, "));
}

TEST_F(UpscalingCommand, EnlargesForHiresScale) {
  // The same as a second `generate` that begins with the enlarged image.
  const HostArray small = pixels({"sample_seed=4"});
  const Network n("x4", 192);
  write_png(t / "first.png", enlarged(small, 32, 48, &*n.upscaler));
  const HostArray second =
      pixels({"image=" + (t / "first.png"), "strength=0.5", "height=32", "width=48", "sample_seed=4"});
  const std::vector<std::string> hires = {"hires_scale=2", "hires_strength=0.5", "sample_seed=4"};
  auto with = [&](std::vector<std::string> words) {
    words.insert(words.begin(), hires.begin(), hires.end());
    return words;
  };
  EXPECT_LE(difference(pixels(with({upscaler})), second), 2);
  EXPECT_TRUE(contains(text(), "Hires upscale: 2, Hires upscaler: x4, "));
  const HostArray lanczos = pixels(with({upscaler, "hires_upscaler=lanczos"}));
  EXPECT_EQ(difference(lanczos, pixels(with({}))), 0);
  EXPECT_TRUE(contains(text(), "Hires upscale: 2, Hires upscaler: Lanczos, "));
  const HostArray latent = pixels(with({"hires_upscaler=latent"}));
  EXPECT_EQ(latent.dims(), (Dims{32, 48, 3}));
  EXPECT_GT(difference(latent, lanczos), 2);
  EXPECT_TRUE(contains(text(), "Hires upscale: 2, Hires upscaler: Latent, "));
}

TEST_F(UpscalingCommand, EnlargesAFile) {
  const auto run = [&](std::vector<std::string> words) {
    std::filesystem::remove(t / "large.png");
    words.insert(words.begin(), {"upscale", t / "small.png", t / "large.png"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return decode_image(t / "large.png");
  };
  // Another program's image, with PyTorch's numbers.
  write_png(t / "small.png", golden().at("image"), {{"parameters", "a heart\nSteps: 4, Seed: 5"}});
  EXPECT_LE(difference(run({upscaler}), golden().at("x4")), 1);
  EXPECT_TRUE(contains(read_file(t / "large.png"),
                       "a heart\nSteps: 4, Seed: 5, Postprocess upscale by: 4, Postprocess upscaler: x4"));
  EXPECT_EQ(difference(run({"upscale=1.5"}), resize_rgb8(golden().at("image"), 27, 39, Filter::lanczos)), 0);
  EXPECT_EQ(run({upscaler, "upscale=2", "upscaler_tile=16"}).dims(), (Dims{36, 52, 3}));
  // An image of ours is the one that `generate` enlarges, and is generated again from its file.
  const HostArray generated = pixels({upscaler, "upscale=4"});
  pixels({});
  std::filesystem::copy_file(t / "out/image_0.png", t / "small.png", std::filesystem::copy_options::overwrite_existing);
  const HostArray large = run({upscaler});
  EXPECT_LE(difference(large, generated), 1);
  EXPECT_TRUE(contains(read_file(t / "large.png"), ", Postprocess upscale by: 4, Postprocess upscaler: x4, Image: 0"));
  std::filesystem::remove_all(t / "out");
  const Outcome again = maxdiffusion({"generate", t / "large.png", "output_dir=" + (t / "out")});
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_LE(difference(decode_image(t / "out/image_0.png"), large), 1);
}

TEST_F(UpscalingCommand, OfAFileRefusesWhatItCannotWriteOrRead) {
  write_png(t / "small.png", golden().at("image"));
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{t / "small.png"}, "1 files are given; expected the image and the PNG file to write"},
           {{t / "small.png", t / "large.jpg"}, "expected a name that ends with .png"},
           {{t / "small.png", t / "small.png"}, "exists; expected the name of a new file"},
           {{t / "none.png", t / "large.png"}, "none.png"},
           {{t / "small.png", t / "large.png", "upscale=9"}, "upscale is 9; expected 1 to 8"},
           {{t / "small.png", t / "large.png", "upscaler_tile=20"}, "upscaler_tile is 20; expected a multiple of 16"},
           {{t / "small.png", t / "large.png", "upscaler=" + kSd + "/vae/diffusion_pytorch_model.safetensors"},
            "has no convolution conv_first.weight"}}) {
    std::vector<std::string> all = {"upscale"};
    all.insert(all.end(), words.begin(), words.end());
    const Outcome o = maxdiffusion(all);
    EXPECT_TRUE(o.status == 2 || o.status == 4) << o.err;
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
}

TEST_F(UpscalingCommand, RefusesWhatDoesNotEnlarge) {
  write_file_atomic(t / "text.safetensors", "no tensors");
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"hires_scale=2", "hires_strength=0.5", "hires_upscaler=upscaler"},
            "hires_upscaler is upscaler without upscaler; expected upscaler=FILE.safetensors too"},
           {{"hires_upscaler=nearest"}, "hires_upscaler is `nearest`, expected"},
           {{"upscale=0.5"}, "upscale is `0.5`, expected"},
           {{"upscale=2", "output_type=latent"}, "upscale is 2; expected 1: latents are not enlarged"},
           {{upscaler, "upscale=2", "upscaler_tile=100"}, "upscaler_tile is 100; expected a multiple of 16"},
           {{"upscale=2", "upscaler=" + kSd + "/vae/diffusion_pytorch_model.safetensors"},
            "has no convolution conv_first.weight; expected a .safetensors file of ESRGAN"},
           {{"upscale=2", "upscaler=" + (t / "text.safetensors")}, t / "text.safetensors"}}) {
    const Outcome o = generate(words);
    EXPECT_NE(o.status, 0);
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
}

}  // namespace
}  // namespace md
