// The search for block sizes: which are tried, that the fastest is taken and reaches the kernels, timing on a device.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/nn/layer_keys.h"
#include "maxdiffusion/nn/scope.h"
#include "maxdiffusion/ops/attention_search.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/one_device.h"
#include "tests/tiles/programs.h"

namespace md {
namespace {

using testing::HasSubstr;

std::shared_ptr<const BlockSearch> search(bool full = false, const std::string& folder = "") {
  return std::make_shared<const BlockSearch>(BlockSearch{.full = full, .runs = 3, .folder = folder});
}

TileAttention sizes(int64_t queries, int64_t keys, AttentionBlocks blocks, int64_t head_dim = 128) {
  return {.heads = 2,
          .kv_heads = 2,
          .queries = queries,
          .keys = keys,
          .head_dim = head_dim,
          .blocks = std::move(blocks),
          .chip = tile_chip("TPU v5")};
}

TEST(TileSearch, TriesWhatFitsAndTheDefaultsFirst) {
  const AttentionBlocks usual = blocks_of_chip("TPU v5");
  const TileAttention a = sizes(75600, 75600, {.search = search()});
  const auto tried = block_candidates(a, usual, false);
  ASSERT_FALSE(tried.empty());
  EXPECT_EQ(tried[0].keys, usual.keys);
  EXPECT_EQ(tried[0].queries, 3024);
  for (const AttentionBlocks& b : tried) {
    TileAttention with = a;
    with.blocks = b;
    EXPECT_LE(tile_attention_program(with).fast_memory(), a.chip.fast_memory);
    EXPECT_EQ(b.keys % b.keys_compute, 0);
  }
  // 4 sizes of queries by 4 of keys, of which 1, 2, 3 and 3 have so many divisors of at most 1024; and the defaults.
  EXPECT_EQ(tried.size(), 4 * (1 + 2 + 3 + 3) + 1);

  // Longer blocks than the lengths are tried once, and what does not fit not at all.
  for (const AttentionBlocks& b : block_candidates(sizes(300, 200, {.search = search()}), usual, false)) {
    EXPECT_LE(b.queries, 304);
    EXPECT_EQ(b.keys, 256);
  }
  TileAttention small = sizes(75600, 75600, {.search = search(true)}, 256);
  const size_t all = block_candidates(small, usual, false).size();
  small.chip = tile_chip("an unknown TPU");
  const size_t fitting = block_candidates(small, usual, false).size();
  EXPECT_LT(fitting, all);
  EXPECT_GT(fitting, 100U);
}

TEST(TileSearch, KeepsSizesThatAreSet) {
  const auto forward = block_candidates(sizes(4096, 4096, {.keys = 512, .search = search()}), {}, false);
  EXPECT_EQ(forward.size(), 4U * 2);  // compute 256 and 512; the default, 1024 by 512 and 512, is among them
  for (const AttentionBlocks& b : forward) EXPECT_EQ(b.keys, 512);
  for (const AttentionBlocks& b : block_candidates(
           sizes(4096, 4096, {.queries = 1024, .keys = 1024, .gradient_queries = 256, .search = search()}), {}, true)) {
    EXPECT_EQ(b.gradient_queries, 256);
    EXPECT_EQ(b.queries, 1024);
  }
}

/// Graph options of a TPU on which combination `fastest`, of all that are measured, takes 1 s, and the others 2 s.
/// Those of `refused` are not compiled.
GraphOptions fake_tpu(size_t fastest, int& measured, const std::vector<size_t>& refused) {
  GraphOptions o;
  o.platform = Platform::tpu;
  o.device_kind = "TPU v5";
  o.measure = [fastest, &measured, refused](const Graph& g, int64_t runs) {
    EXPECT_EQ(runs, 3);
    EXPECT_TRUE(g.options().one_device());
    const auto i = static_cast<size_t>(measured++);
    check(std::ranges::find(refused, i) == refused.end(), Code::device, "the compiler refuses");
    return i == fastest ? 1.0 : 2.0;
  };
  return o;
}

std::string module_of(const GraphOptions& o, int64_t queries, int64_t keys, const AttentionBlocks& blocks) {
  Graph g(o);
  const Tensor q = g.input("q", {DType::bf16, {1, queries, 2, 128}}),
               k = g.input("k", {DType::bf16, {1, keys, 2, 128}});
  const LocalAttention local{.blocks = blocks};
  const AttentionResult r = tile_attention(q, k, k, local);
  const AttentionGradient d = tile_attention_gradient(q, k, k, r.y, r.lse, q, local);
  for (const auto& [name, t] : {std::pair{"y", r.y}, {"dq", d.q}, {"dk", d.k}, {"dv", d.v}}) g.output(name, t);
  return to_stablehlo(g);
}

TEST(TileSearch, TakesTheFastestOfAllThatFit) {
  const std::string folder = testing::TempDir() + "/tile_search";
  std::filesystem::remove_all(folder);
  int measured = 0;
  const GraphOptions tpu = fake_tpu(5, measured, {2, 7});
  const AttentionBlocks with{.search = search(false, folder)};
  const TileAttention a = sizes(2000, 1500, with);
  const auto tried = block_candidates(a, blocks_of_chip("TPU v5"), false);
  const std::string module = module_of(tpu, 2000, 1500, with);
  const auto n = static_cast<size_t>(measured);
  const auto gradients = block_candidates(a, blocks_of_chip("TPU v5"), true);
  EXPECT_EQ(n, tried.size() + gradients.size());

  // All gradients take 2 s, so the first stays.
  AttentionBlocks expected = tried[5];
  for (auto size :
       {&AttentionBlocks::gradient_queries, &AttentionBlocks::gradient_keys, &AttentionBlocks::gradient_keys_compute})
    expected.*size = gradients[0].*size;
  GraphOptions plain = tpu;
  plain.measure = nullptr;
  EXPECT_EQ(module, module_of(plain, 2000, 1500, expected));
  EXPECT_NE(module, module_of(plain, 2000, 1500, gradients[0]));

  // Each shape is measured once.
  EXPECT_EQ(module_of(tpu, 2000, 1500, with), module);
  EXPECT_EQ(static_cast<size_t>(measured), n);

  std::istringstream csv(read_file(folder + "/attention_2000x1500x2x128.csv"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(csv, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), tried.size() + 1);
  EXPECT_EQ(lines[0], "block_q,block_kv,block_kv_compute,seconds");
  EXPECT_EQ(lines[6], fmt::format("{},{},{},1.000000000", tried[5].queries, tried[5].keys, tried[5].keys_compute));
  EXPECT_EQ(lines[3], fmt::format("{},{},{},", tried[2].queries, tried[2].keys, tried[2].keys_compute));
  EXPECT_TRUE(exists(folder + "/gradient_2000x1500x2x128.csv"));
}

TEST(TileSearch, FailsIfNothingIsCompiled) {
  GraphOptions tpu;
  tpu.platform = Platform::tpu;
  tpu.measure = [](const Graph&, int64_t) -> double { fail(Code::device, "the compiler refuses"); };
  EXPECT_THROW(searched_blocks(tpu, sizes(640, 640, {.search = search()}), false), Error);
}

TEST(TileSearch, OfNoDeviceIsTheDefaultsAndSaysSo) {
  GraphOptions absent;
  absent.platform = Platform::tpu;
  absent.device_kind = "TPU v5";
  testing::internal::CaptureStderr();
  const std::string module = module_of(absent, 512, 512, {.search = search()});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("enable_tile_search: block sizes are measured by"));
  EXPECT_EQ(module, module_of(absent, 512, 512, blocks_of_chip("TPU v5")));
}

// On the device of the tests: kernels as StableHLO, really compiled and timed; the result is attention.
TEST(TileSearch, MeasuresOnADevice) {
  GraphOptions o = one_device().graph_options();
  ASSERT_TRUE(o.measure);
  o.device_kind = "TPU v5";
  int measured = 0;
  o.measure = [&measured, real = o.measure](const Graph& g, int64_t runs) {
    ++measured;
    const double seconds = real(g, runs);
    EXPECT_TRUE(seconds > 0 && std::isfinite(seconds)) << seconds;
    return seconds;
  };
  const Shape shape{DType::f32, {1, 500, 1, 64}};
  Graph g(o);
  const Tensor q = g.input("q", shape), k = g.input("k", shape), v = g.input("v", shape);
  const LocalAttention searched{.blocks = {.search = search()}};
  const AttentionResult with = tile_attention(q, k, v, searched), plain = tile_attention(q, k, v, {});
  EXPECT_GT(measured, 3);
  g.output("difference", max(abs(with.y - plain.y)));
  HostArray in(shape);
  auto values = in.mutable_view<float>();
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i)));
  EXPECT_LT(evaluate(one_device(), g, {in, in, in})[0].to_doubles()[0], 1e-5);
}

TEST(TileSearch, KeysReachTheKernels) {
  LayerKeys keys;
  EXPECT_FALSE(scope_options(keys).attention_blocks.search);
  keys.enable_tile_search = true;
  keys.tile_search_mode = "full";
  keys.tile_search_iters = 7;
  keys.tile_search_out = "/timings";
  const auto s = scope_options(keys).attention_blocks.search;
  ASSERT_TRUE(s);
  EXPECT_TRUE(s->full);
  EXPECT_EQ(s->runs, 7);
  EXPECT_EQ(s->folder, "/timings");
}

}  // namespace
}  // namespace md
