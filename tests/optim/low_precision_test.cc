// Weights narrower than float32: stochastic rounding.

#include "maxdiffusion/optim/low_precision.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "tests/one_device.h"

namespace md {
namespace {

/// The arrays, rounded at this step with this seed. `axes`: logical names of their dims.
std::vector<std::vector<double>> rounded(const Devices& devices, const std::vector<HostArray>& xs, DType to,
                                         int32_t step = 3, uint64_t seed = 7, const LogicalAxes& axes = {}) {
  Graph g(devices.graph_options(&devices.rules()));
  std::vector<Tensor> inputs;
  for (const HostArray& x : xs) inputs.push_back(g.input("x" + std::to_string(inputs.size()), x.shape(), axes));
  const Rng rng = Rng::seed(g, seed).at_step(constant(g, step, DType::s32)).for_("stochastic rounding").for_("unet");
  for (Tensor t : round_stochastically(inputs, to, rng))
    g.output("y" + std::to_string(g.outputs().size()), t, "x" + std::to_string(g.outputs().size()));
  const Program program = compile(devices, g, {.jax_cache_dir = "off", .xla_flags = ""}, "rounding");
  std::vector<Array> arrays;
  std::vector<Array*> pointers;
  for (size_t i = 0; i < xs.size(); ++i) {
    EXPECT_EQ(program.input_sharding(i).replicated(), devices.mesh().devices() == 1);
    arrays.push_back(devices.put(xs[i], program.input_sharding(i)));
  }
  for (Array& a : arrays) pointers.push_back(&a);
  std::vector<std::vector<double>> out;
  for (const Array& a : program.run(pointers)) {
    const HostArray y = devices.get(a);
    EXPECT_EQ(y.dtype(), to);
    out.push_back(y.to_doubles());
  }
  return out;
}
std::vector<double> rounded(const HostArray& x, DType to) { return rounded(one_device(), {x}, to)[0]; }

HostArray f32(const std::vector<float>& values) {
  return HostArray::of<float>({DType::f32, {static_cast<int64_t>(values.size())}}, values);
}

constexpr int64_t kDraws = 1 << 16;

HostArray repeated(float value) { return f32(std::vector<float>(kDraws, value)); }

TEST(StochasticRounding, GoesToBothNeighboursWithTheValueAsTheMean) {
  struct Case {
    DType to;
    float value;
    double below, distance;
  };
  const std::vector<Case> cases = {
      {DType::bf16, 1 + 0.3f / 128, 1, 1.0 / 128},  // much finer than bf16 near 1
      {DType::bf16, -1 - 0.3f / 128, -1 - 1.0 / 128, 1.0 / 128},
      {DType::bf16, 2 - 0.01f / 128, 2 - 1.0 / 128, 1.0 / 128},  // up to the next power of two
      {DType::bf16, 3e-20f, 0, 0},                               // below and distance are computed in the loop
      {DType::f16, 0.1f, 0, 0},
      {DType::f16, 1e-7f, std::ldexp(1, -24), std::ldexp(1, -24)},  // below the smallest normal number
      {DType::f8e4m3fn, 1.05f, 1, 1.0 / 8},
      {DType::f8e5m2, -1.05f, -1.25, 1.0 / 4},
  };
  for (Case c : cases) {
    if (c.distance == 0) {
      const int mantissa = c.to == DType::bf16 ? 7 : 10;
      c.distance = std::ldexp(1.0, std::ilogb(c.value) - mantissa);
      c.below = std::floor(c.value / c.distance) * c.distance;
    }
    double sum = 0;
    for (double v : rounded(repeated(c.value), c.to)) {
      ASSERT_TRUE(v == c.below || v == c.below + c.distance) << v << " of " << c.value;
      sum += (v - c.below) / c.distance;
    }
    const double part = (c.value - c.below) / c.distance, deviation = std::sqrt(part * (1 - part) / kDraws);
    EXPECT_NEAR(sum / kDraws, part, 4 * deviation + 1e-4) << c.value << " as " << to_string(c.to);
  }
}

TEST(StochasticRounding, LeavesWhatTheTypeCanHold) {
  const std::vector<float> values = {
      0, 1, -1, 0.75f, -3.5f, 1 + 1.0f / 128, 2 - 1.0f / 128, std::ldexp(1.0f, -90), INFINITY, -INFINITY};
  std::vector<float> many;
  for (int i = 0; i < 200; ++i) many.insert(many.end(), values.begin(), values.end());
  EXPECT_EQ(rounded(f32(many), DType::bf16), f32(many).to_doubles());
  EXPECT_TRUE(std::isnan(rounded(f32({NAN}), DType::bf16)[0]));
}

TEST(StochasticRounding, IsIndependentByElementParameterStepAndSeed) {
  const HostArray half = repeated(1 + 0.5f / 128);
  const auto both = rounded(one_device(), {half, half}, DType::bf16);
  const std::vector<std::vector<double>> all = {both[0], both[1], rounded(one_device(), {half}, DType::bf16, 4)[0],
                                                rounded(one_device(), {half}, DType::bf16, 3, 8)[0]};
  EXPECT_EQ(rounded(one_device(), {half, half}, DType::bf16), both);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t lag : {1, 2, 256}) {  // neighbours in a row, and in a column of 256
      double same = 0;
      for (size_t k = lag; k < all[i].size(); ++k) same += all[i][k] == all[i][k - lag];
      EXPECT_NEAR(same / kDraws, 0.5, 0.01) << i << " lag " << lag;
    }
    for (size_t j = 0; j < i; ++j) {
      double same = 0;
      for (size_t k = 0; k < all[i].size(); ++k) same += all[i][k] == all[j][k];
      EXPECT_NEAR(same / kDraws, 0.5, 0.01) << i << " and " << j;
    }
  }
}

/// The random key of the first parameter that `rounded` uses.
std::pair<uint32_t, uint32_t> first_key(int32_t step, uint64_t seed) {
  Graph g(one_device().graph_options(&one_device().rules()));
  const Rng rng = Rng::seed(g, seed).at_step(constant(g, step, DType::s32)).for_("stochastic rounding").for_("unet");
  g.output("key", random_bits(rng, {1, 2}));
  const Program program = compile(one_device(), g, {.jax_cache_dir = "off", .xla_flags = ""}, "key");
  const HostArray key = one_device().get(program.run(std::vector<Array*>{})[0]);
  return {key.view<uint32_t>()[0], key.view<uint32_t>()[1]};
}

// Reference in integers: adds 16 random bits below bf16's last bit and truncates. A negative number's pattern holds its
// magnitude, so the complement of the random bits is added: the number then moves in the same direction.
TEST(StochasticRounding, IsAnAdditionToBitPatternsAndACut) {
  const auto [k0, k1] = first_key(3, 7);
  auto hash = [](uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
  };
  std::vector<float> values;
  for (int i = 0; i < 4096; ++i) values.push_back(std::ldexp(std::sin(1.7f * static_cast<float>(i)), i % 40 - 20));
  const std::vector<double> found = rounded(f32(values), DType::bf16);
  for (uint32_t i = 0; i < values.size(); ++i) {
    const uint32_t random = hash(hash(i + k0) + k1) >> 16;
    const auto pattern = std::bit_cast<uint32_t>(values[i]);
    const uint32_t added = pattern + (values[i] < 0 ? 0xffffu - random : random);
    ASSERT_EQ(found[i], std::bit_cast<float>(added & 0xffff0000u)) << values[i] << " at " << i;
  }
}

// P-8
TEST(StochasticRounding, GivesTheSameBitsOnEightDevices) {
  std::vector<float> values(3072);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  const HostArray x = HostArray::of<float>({DType::f32, {64, 48}}, values);
  const auto expected = rounded(one_device(), {x, x}, DType::bf16);
  const Devices eight = Devices::open("cpu", 8, {.ici_fsdp_parallelism = 4, .ici_tensor_parallelism = 2});
  EXPECT_EQ(rounded(eight, {x, x}, DType::bf16, 3, 7, {axis::kEmbed, axis::kHeads}), expected);
}

TEST(LowPrecisionUpdate, UnknownNamesAreRefusedWithTheKnown) {
  try {
    low_precision_update("nearest");
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "low_precision_update is 'nearest'; expected one of: master_f32, stochastic_rounding, round_to_nearest");
  }
}

}  // namespace
}  // namespace md
