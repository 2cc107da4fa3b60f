// Rotary positions as TPUs compute them, compared with the form for other devices.
#include "maxdiffusion/nn/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/autodiff/grad.h"
#include "tests/one_device.h"

namespace md {
namespace {

constexpr int64_t kBatch = 2, kTokens = 6, kHeads = 3, kSize = 16;

/// Rotated features and their gradient for the cotangent `dy`.
std::vector<std::vector<double>> rotated_on(Platform platform, const HostArray& x, const HostArray& dy) {
  GraphOptions options = one_device().graph_options();
  options.platform = platform;
  Graph g(options);
  const Tensor in = g.input("x", x.shape());
  const Tensor y = nn::rotated(in, nn::grid_rotary(g, {1, 2, 3}, {4, 6, 6}, 100));
  g.output("dx", vjp({y}, {g.input("dy", dy.shape())}, {in})[0]);
  g.output("y", y);
  const std::vector<HostArray> out = evaluate(one_device(), g, {x, dy});
  return {out[1].to_doubles(), out[0].to_doubles()};
}

TEST(Rotary, OfTpusIsTheSameInTheOrderOfFeatures) {
  for (const DType type : {DType::f32, DType::bf16}) {
    HostArray x(Shape{DType::f32, {kBatch, kTokens, kHeads, kSize}}), dy(x.shape()), dy_apart(x.shape());
    const auto v = x.mutable_view<float>(), d = dy.mutable_view<float>(), apart = dy_apart.mutable_view<float>();
    // Other devices return all first features of the pairs, then all second ones.
    const auto place = [](size_t i) { return i / kSize * kSize + i % kSize / 2 + (i % 2) * (kSize / 2); };
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = static_cast<float>(std::sin(1.3 * static_cast<double>(i)));
      d[i] = static_cast<float>(std::cos(0.7 * static_cast<double>(i)));
      apart[place(i)] = d[i];
    }
    const auto tpu = rotated_on(Platform::tpu, x.cast(type), dy.cast(type)),
               cpu = rotated_on(Platform::cpu, x.cast(type), dy_apart.cast(type));
    const double tolerance = type == DType::f32 ? 3e-7 : 8e-3;  // the last bit of values up to 1.4
    for (size_t i = 0; i < v.size(); ++i) {
      EXPECT_NEAR(tpu[0][i], cpu[0][place(i)], tolerance) << to_string(type) << " " << i;
      EXPECT_NEAR(tpu[1][i], cpu[1][i], tolerance) << to_string(type) << " gradient " << i;
    }
  }
}

}  // namespace
}  // namespace md
