// A family's autoencoder processes videos chunk by chunk.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/kernels/processor.h"
#include "maxdiffusion/tasks/inputs.h"
#include "tests/families/video_family.h"
#include "tests/tiny_folder.h"

namespace md {
namespace {

constexpr int64_t kVideos = 3, kFrames = 13;  // four latent frames: the last chunk of two is half full

std::shared_ptr<const VideoFamily> family() {
  static const auto one = std::make_shared<const VideoFamily>(nlohmann::json{{"base_dim", 4},
                                                                             {"z_dim", 2},
                                                                             {"dim_mult", {1, 1, 2}},
                                                                             {"num_res_blocks", 1},
                                                                             {"temperal_downsample", {true, true}}});
  return one;
}

MediaAutoencoder coder(const Devices& devices, MediaChunks chunks) {
  return {devices,
          family()->spec().autoencoder,
          family()->random_weights(),
          2,
          {},
          {.jax_cache_dir = "off", .xla_flags = {}},
          {},
          chunks};
}

HostArray pixels(int64_t frames = kFrames) {
  HostArray a({DType::u8, {kVideos, frames, 8, 12, 3}});
  auto v = a.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(i * i % 251);
  return a;
}

HostArray latents() {
  HostArray a({DType::f32, {kVideos, 4, 2, 3, 2}});
  auto v = a.mutable_view<float>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(static_cast<float>(i * i));
  return a;
}

double difference(const HostArray& a, const HostArray& b) {
  EXPECT_EQ(to_string(a.shape()), to_string(b.shape()));
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) most = std::max(most, std::abs(x[i] - y[i]));
  return most;
}

TEST(Videos, InChunksGiveWhatTheyGiveWhole) {
  const Devices one = Devices::open(), two = Devices::open("cpu", 2);
  // One device uses our kernels, two use the compiler's code. This decoder of four channels amplifies f32 rounding:
  // compared with f64 the compiler's code has an error of 6e-6, our kernels 8e-6, and 1.5e-5 if oneDNN has only AVX2.
  // At worst both add up; 1.3e-5 was seen with avx512_core_bf16.
  const double rounding = processor().wide_vectors ? 1.4e-5 : 2.1e-5;
  HostArray moments, decoded;
  for (const Devices* devices : {&one, &two}) {
    MediaAutoencoder whole = coder(*devices, {.encode = 0, .decode = 0});
    const HostArray whole_moments = whole.encode(pixels()), whole_decoded = whole.decode(latents());
    if (devices == &one) {
      moments = whole_moments, decoded = whole_decoded;
      EXPECT_EQ(moments.dims(), (Dims{kVideos, 4, 2, 3, 4}));
      EXPECT_EQ(decoded.dims(), (Dims{kVideos, kFrames, 8, 12, 3}));
    }
    EXPECT_LE(difference(whole_moments, moments), 1e-6);
    EXPECT_LE(difference(whole_decoded, decoded), rounding);
    for (int64_t n : {1, 2}) {
      MediaAutoencoder chunks = coder(*devices, {.encode = n, .decode = n});
      EXPECT_LE(difference(chunks.encode(pixels()), whole_moments), 1e-6) << n << " at a time";
      EXPECT_LE(difference(chunks.decode(latents()), whole_decoded), 1e-6) << n << " at a time";
    }
  }
}

// S2-17
TEST(Videos, HaveTheirAutoencoderWholeOnEveryDeviceOrSplitByTheRules) {
  const VideoFamily wide({{"base_dim", 8},
                          {"z_dim", 2},
                          {"dim_mult", {1, 1, 2}},
                          {"num_res_blocks", 1},
                          {"temperal_downsample", {true, true}}});
  MeshConfig mesh;
  mesh.ici_data_parallelism = 1, mesh.ici_fsdp_parallelism = 8;
  const Devices eight = Devices::open("cpu", 8, mesh);
  const AxisRules rules =
      AxisRules::make({.logical_axis_rules = {"[['conv_out', 'fsdp']]"}, .data_sharding = {}}, mesh.mesh_axes);
  /// The number of sharded autoencoder arrays, and the bytes of all arrays on one device.
  auto placed = [&](bool replicate) {
    Graph g(eight.graph_options(&rules));
    ParamTable params;
    EncoderKeys keys;
    keys.replicate_vae = replicate;
    const Models models = [&](const std::string& component) {
      return Scope(g, params, component, autoencoder_options({}, keys));
    };
    MediaState state;
    g.output("y", wide.spec().autoencoder->decode(models, g.input("x", {DType::f32, {1, 1, 2, 2, 2}}), &state));
    const HostArrays weights = wide.random_weights();
    ArrayMap arrays;
    for (const GraphInput& in : g.inputs())
      if (const auto w = weights.find(in.name); w != weights.end())
        arrays[in.name] = eight.put(w->second, {in.sharding}, in.name);
    EXPECT_GT(arrays.size(), 20u);
    std::pair<int, int64_t> split_and_bytes = {0, 0};
    for (const auto& [name, a] : arrays) {
      split_and_bytes.first += !a.sharding().replicated();
      split_and_bytes.second += a.bytes_per_device();
      if (replicate) {
        EXPECT_EQ(a.bytes_per_device(), a.shape().bytes()) << name;
      }
    }
    return split_and_bytes;
  };
  const auto [split, part] = placed(false);
  const auto [none, whole] = placed(true);
  EXPECT_GT(split, 1);
  EXPECT_EQ(none, 0);
  EXPECT_LT(part, whole);
}

TEST(Autoencoder, TakesAsManyAtATimeAsTheMemoryHolds) {
  const Devices devices = Devices::open();
  const auto images = tiny_family();
  HostArrays weights;
  {
    Graph g(devices.graph_options());
    ParamTable params;
    images->spec().autoencoder->encode([&](const std::string& component) { return Scope(g, params, component, {}); },
                                       g.input("in", {DType::f32, {1, 64, 64, 3}}), nullptr);
    for (const Param& p : params.params()) weights[p.input] = initial_value(p, 3);
  }
  HostArray many({DType::u8, {7, 64, 64, 3}});
  auto v = many.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(i * i % 251);
  const CompileConfig compile{.jax_cache_dir = {}, .xla_flags = "--xla_backend_optimization_level=0"};
  std::vector<int64_t> done;  // progress after each run of a program
  const auto encoded = [&](int64_t bytes) {
    MediaAutoencoder coder(devices, images->spec().autoencoder, weights, 7, {}, compile, {}, {}, bytes);
    done.clear();
    return coder.encode(many, [&](int64_t n) { done.push_back(n); });
  };
  const HostArray whole = encoded(int64_t{1} << 40);
  EXPECT_EQ(done, std::vector<int64_t>{7});
  // `one`: the largest budget with one frame at a time; twice as much holds two frames, three times as much three.
  int64_t one = 1;
  for (int64_t extra = int64_t{1} << 22; extra > 4096; extra /= 2) {
    encoded(one + extra);
    if (done.front() == 1) one += extra;
  }
  EXPECT_GT(one, int64_t{64} * 64 * 8 * 4);  // two arrays coexist: the widest layer's output, f32
  EXPECT_LT(one, int64_t{64} * 64 * 8 * 4 * 16);
  for (const auto& [bytes, steps] : {std::pair{int64_t{1}, std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}},
                                     {one + 8192, {2, 4, 6, 7}},
                                     {one * 3 / 2 + 16384, {3, 6, 7}}}) {
    EXPECT_LE(difference(encoded(bytes), whole), 1e-5);
    EXPECT_EQ(done, steps) << bytes;
  }
}

TEST(Videos, LookBackOnly) {
  const Devices one = Devices::open();
  MediaAutoencoder chunks = coder(one, {});
  const HostArray all = chunks.encode(pixels());
  EXPECT_LE(difference(chunks.encode(block(pixels(), 0, kVideos, 0, 5)), block(all, 0, kVideos, 0, 2)), 1e-6);
  EXPECT_LE(difference(chunks.encode(block(pixels(), 0, kVideos, 0, 1)), block(all, 0, kVideos, 0, 1)), 1e-6);
}

TEST(Videos, OfOtherLengthsAreRefused) {
  const Devices one = Devices::open();
  MediaAutoencoder chunks = coder(one, {});
  try {
    chunks.encode(pixels(4));
    ADD_FAILURE() << "four frames were taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(std::string(e.what()).find("1 frame plus a multiple of 4"), std::string::npos) << e.what();
  }
}

TEST(Videos, AreFieldsOfBatchesWithAnAxisOfFrames) {
  const MediaSize size{16, 24, 9};
  const Dims latent = family()->latent_dims(size);
  EXPECT_EQ(family()->spec().autoencoder->pixel_dims(family()->spec().autoencoder->media_size(latent)),
            (Dims{9, 16, 24, 3}));
  EXPECT_EQ(to_string(pixels_input()->fields(*family()->spec().autoencoder, {2, latent})[0].shape), "u8[2,9,16,24,3]");
}

}  // namespace
}  // namespace md
