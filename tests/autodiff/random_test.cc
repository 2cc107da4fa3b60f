#include "maxdiffusion/ops/random.h"

#include <cmath>
#include <map>
#include <set>

#include "tests/autodiff/gradient_check.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

using Words = std::array<uint32_t, 2>;

TEST(Threefry, KnownAnswers) {  // Random123's kat_vectors, threefry2x32 with 20 rounds
  EXPECT_EQ(threefry({0, 0}, {0, 0}), (Words{0x6b200159, 0x99ba4efe}));
  EXPECT_EQ(threefry({0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}), (Words{0x1cb996fc, 0xbb002be7}));
  EXPECT_EQ(threefry({0x13198a2e, 0x03707344}, {0x243f6a88, 0x85a308d3}), (Words{0xc4923a9c, 0x483df7a0}));
}

std::vector<HostArray> evaluate_graph(const std::function<std::vector<Tensor>(Rng)>& f, uint64_t seed = 42) {
  return Traced{{}, [&](Graph& g, const std::vector<Tensor>&) { return f(Rng::seed(g, seed)); }}.run();
}

TEST(Random, BitsAreTheHostsForTheSameSeedAndPurpose) {
  for (uint64_t seed : {uint64_t{0}, uint64_t{42}, uint64_t{0x123456789abcdef0}}) {
    auto out = evaluate_graph(
        [](Rng r) {
          return std::vector<Tensor>{random_bits(r.for_("noise"), {3, 1, 5, 7}), random_bits(r.for_("noise"), {}),
                                     random_uniform(r.for_("x"), f32({100})), random_normal(r.for_("x"), f32({4000})),
                                     random_integers(r.for_("x"), {50}, -3, 1000)};
        },
        seed);
    HostRng noise(seed, "noise"), x(seed, "x");
    auto bits = out[0].view<uint32_t>();
    for (size_t i = 0; i < bits.size(); ++i) ASSERT_EQ(bits[i], noise.bits(i)) << i;
    EXPECT_EQ(out[1].view<uint32_t>()[0], noise.bits(0));
    for (size_t i = 0; i < 100; ++i) EXPECT_EQ(out[2].view<float>()[i], static_cast<float>(x.uniform(i)));
    std::vector<float> normals(4000);
    x.fill(HostRng::Distribution::normal, 1, 0, normals);
    for (size_t i = 0; i < 4000; ++i) EXPECT_NEAR(out[3].view<float>()[i], normals[i], 2e-5) << i;
    for (size_t i = 0; i < 50; ++i) EXPECT_EQ(out[4].view<int32_t>()[i], static_cast<int64_t>(x.below(i, 1003)) - 3);
  }
}

TEST(Random, NumberedRowsEqualThoseOfTheBatch) {
  const auto out = evaluate_graph([](Rng r) {
    const std::vector<int32_t> numbers = {4, 0, 4, 2};
    const Rng some = r.with_rows(constant(r.key().graph(), HostArray::of<int32_t>({DType::s32, {4}}, numbers)));
    return std::vector<Tensor>{random_normal(r.for_("noise"), f32({5, 2, 3})),
                               random_normal(some.for_("noise"), f32({4, 2, 3})), random_bits(r.fold(2), {5}),
                               random_bits(some.fold(2), {4})};
  });
  const size_t numbers[] = {4, 0, 4, 2};
  for (size_t row = 0; row < 4; ++row) {
    for (size_t i = 0; i < 6; ++i)
      EXPECT_EQ(out[1].view<float>()[row * 6 + i], out[0].view<float>()[numbers[row] * 6 + i]) << row;
    EXPECT_EQ(out[3].view<uint32_t>()[row], out[2].view<uint32_t>()[numbers[row]]) << row;
  }
  EXPECT_THROW(evaluate_graph([](Rng r) {
                 const Rng two = r.with_rows(constant(r.key().graph(), HostArray(Shape{DType::s32, {2}})));
                 return std::vector<Tensor>{random_bits(two, {3})};
               }),
               Error);
}

TEST(Random, OfMoreThanAWordCountsIsNumberedByRows) {
  Graph g(devices().graph_options());
  const Tensor bits = random_bits(Rng::seed(g, 42), {3, int64_t{1} << 31});
  g.output("part", slice(bits, {2, 5}, {3, 25}));
  EXPECT_THROW(random_bits(Rng::seed(g, 42), {2, int64_t{1} << 33}), Error);
  const Program program = compile(devices(), g, {.jax_cache_dir = "off"}, "part_of_a_large_draw");
  ASSERT_LT(program.memory()->temporary, 1 << 20);  // else it would allocate all 25 GB
  const HostArray part = devices().get(program.run(std::vector<Array*>{})[0]);
  for (uint32_t i = 0; i < 20; ++i) EXPECT_EQ(part.view<uint32_t>()[i], threefry({0, 42}, {2, 5 + i})[0]) << i;
}

TEST(Random, HostNormalsAreTheQuantilesOfTheUniforms) {
  const HostRng rng(5, "x");
  constexpr uint64_t kFrom = 0xfffffff0;  // crosses the end of the lower word
  std::vector<float> normal(200000), cut(normal.size()), flat(normal.size());
  rng.fill(HostRng::Distribution::normal, 1, kFrom, normal);
  rng.fill(HostRng::Distribution::truncated_normal, 1, kFrom, cut);
  rng.fill(HostRng::Distribution::symmetric_uniform, 1, kFrom, flat);
  float tail = 0;
  for (size_t i = 0; i < normal.size(); ++i) {
    const double u = rng.uniform(kFrom + i) * 2 - 1 + 0x1p-24, two = std::erf(std::sqrt(2.0));
    ASSERT_NEAR(std::erf(normal[i] / std::sqrt(2.0)), u, 1e-6) << i;
    ASSERT_NEAR(std::erf(cut[i] / std::sqrt(2.0)), two * u, 1e-6) << i;
    ASSERT_EQ(flat[i], static_cast<float>(u - 0x1p-24)) << i;
    ASSERT_LE(std::abs(cut[i]), 2);
    tail = std::max(tail, std::abs(normal[i]));
  }
  EXPECT_GT(tail, 4);
  std::vector<float> one(1);  // an element has the same value alone and among others
  for (size_t i = 0; i < 1000; ++i) {
    rng.fill(HostRng::Distribution::normal, 1, kFrom + i, one);
    ASSERT_EQ(one[0], normal[i]);
  }
}

TEST(Random, SeedIsTheKey) {  // the first known-answer vector, on the device
  auto out = evaluate_graph([](Rng r) { return std::vector<Tensor>{random_bits(r, {1})}; }, 0);
  EXPECT_EQ(out[0].view<uint32_t>()[0], 0x6b200159u);
}

TEST(Random, UniformHasItsMomentsAndRange) {
  auto out = evaluate_graph([](Rng r) {
    return std::vector<Tensor>{random_uniform(r.for_("a"), f32({200000})),
                               random_uniform(r.for_("b"), f32({200000}), -2, 5)};
  });
  double m = 0, m2 = 0;
  for (float v : out[0].view<float>()) {
    ASSERT_GE(v, 0);
    ASSERT_LT(v, 1);
    m += v / 200000.0;
    m2 += double(v) * v / 200000.0;
  }
  EXPECT_NEAR(m, 0.5, 0.003);
  EXPECT_NEAR(m2 - m * m, 1.0 / 12, 0.001);
  m = 0;
  for (float v : out[1].view<float>()) {
    ASSERT_GE(v, -2);
    ASSERT_LT(v, 5);
    m += v / 200000.0;
  }
  EXPECT_NEAR(m, 1.5, 0.02);
}

TEST(Random, NormalHasItsMoments) {
  auto out = evaluate_graph([](Rng r) { return std::vector<Tensor>{random_normal(r, f32({400, 1000}))}; });
  double moment[5] = {};
  auto v = out[0].view<float>();
  for (double x : v)
    for (int p = 1; p <= 4; ++p) moment[p] += std::pow(x, p) / static_cast<double>(v.size());
  EXPECT_NEAR(moment[1], 0, 0.006);
  EXPECT_NEAR(moment[2], 1, 0.01);
  EXPECT_NEAR(moment[3], 0, 0.025);
  EXPECT_NEAR(moment[4], 3, 0.07);
  double neighbours = 0;
  for (size_t i = 1; i < v.size(); ++i) neighbours += double(v[i]) * v[i - 1] / static_cast<double>(v.size());
  EXPECT_NEAR(neighbours, 0, 0.006);
}

TEST(Random, IntegersCoverTheirRangeEvenly) {
  auto out = evaluate_graph([](Rng r) { return std::vector<Tensor>{random_integers(r, {100000}, -2, 8)}; });
  std::map<int32_t, int> counts;
  for (int32_t v : out[0].view<int32_t>()) ++counts[v];
  EXPECT_EQ(counts.size(), 10u);
  EXPECT_EQ(counts.begin()->first, -2);
  for (auto [value, n] : counts) EXPECT_NEAR(n, 10000, 400) << value;
}

TEST(Random, KeysOfStepsPurposesAndUsesAllDiffer) {
  auto out = evaluate_graph([](Rng r) {
    std::vector<Tensor> keys = {r.key()};
    for (int step : {0, 1, 2, 1000}) {
      Rng s = r.at_step(constant(r.key().graph(), step, DType::s32));
      keys.push_back(s.key());
      for (const char* p : {"noise", "timestep", "dropout"}) {
        keys.push_back(s.for_(p).key());
        keys.push_back(s.for_(p).fold(0).key());
        keys.push_back(s.for_(p).fold(1).key());
      }
    }
    return keys;
  });
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (const HostArray& k : out) seen.insert({k.view<uint32_t>()[0], k.view<uint32_t>()[1]});
  EXPECT_EQ(seen.size(), out.size());
}

TEST(Random, RefusesAWrongKeyAndAnEmptyRange) {
  Graph g;
  Rng bad(g.input("k", {DType::u32, {3}}));
  EXPECT_THROW(random_bits(bad, {2}), Error);
  EXPECT_THROW(random_integers(Rng::seed(g, 1), {2}, 5, 5), Error);
}

TEST(KeyOfSeed, IsTheLowWordThenTheHighOne) {
  const HostArray key = key_of_seed(0x0000000300000005);
  EXPECT_EQ(key.shape(), (Shape{DType::u32, {2}}));
  EXPECT_EQ(key.to_doubles(), (std::vector<double>{5, 3}));
}

}  // namespace
}  // namespace md
