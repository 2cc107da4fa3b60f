// Attention kernels: their StableHLO compared with attention in double on the host, and compiled for four generations
// of TPUs and two of GPUs.
#include <cmath>
#include <span>

#include "maxdiffusion/ops/attention_tiles.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"
#include "tests/tiles/programs.h"
#include "tests/tiles/triton_values.h"

namespace md {
namespace {

struct Case {
  const char* name;
  int64_t lq, lk, head_dim = 128;
  DType type = DType::f32;
  bool causal = false, with_lengths = false;
  int64_t first_query = 0, first_key = 0, keys = -1;
  int64_t heads = 1, kv_heads = 1;
  bool key_bias = false, segments = false;
  AttentionBlocks blocks = {.queries = 16, .keys = 256, .keys_compute = 128};
};

const Case kCases[] = {
    {"whole blocks", 32, 512, 128, DType::f32, false, false, 0, 0, -1, 2, 2},
    {"bf16, tails", 50, 333, 128, DType::bf16},
    {"bf16, causal, several blocks", 96, 320, 128, DType::bf16, true},
    {"keys of each sample, causal, at positions", 32, 384, 128, DType::f32, true, true, 300, 128},
    {"heads of 64", 32, 256, 64, DType::bf16},
    {"heads of 72, tails", 20, 300, 72},
    {"heads of 256", 16, 256, 256},
    {"a sequence shorter than a block", 20, 77, 96},
    {"keys of each sample", 32, 384, 64, DType::f32, false, true},
    {"keys end", 32, 384, 64, DType::f32, false, false, 0, 256, 500},
    {"grouped heads", 16, 256, 64, DType::bf16, true, false, 0, 0, -1, 4, 2},
    {"grouped heads of 128", 16, 256, 128, DType::f32, false, false, 0, 0, -1, 4, 1},
    {"bias of keys", 32, 384, 128, DType::f32, false, false, 0, 0, -1, 2, 1, true},
    {"bias of keys, bf16, tails", 20, 300, 64, DType::bf16, false, false, 0, 0, -1, 1, 1, true},
    {"bf16 bias of keys, causal", 32, 256, 128, DType::bf16, true, false, 0, 0, -1, 1, 1, true},
    {"segments", 48, 300, 128, DType::f32, false, false, 0, 0, -1, 2, 2, false, true},
    {"segments and a bias of keys, keys of each sample", 32, 384, 64, DType::f32, false, true, 0, 0, -1, 1, 1, true,
     true},
};
const int32_t kLengths[] = {300, 130};

std::vector<Shape> shapes(const Case& c) {
  return {{c.type, {2, c.lq, c.heads, c.head_dim}},
          {c.type, {2, c.lk, c.kv_heads, c.head_dim}},
          {c.type, {2, c.lk, c.kv_heads, c.head_dim}},
          {c.type, {2, c.lq, c.heads, c.head_dim}}};
}

HostArray wave(const Shape& shape, double phase, double height = 2) {
  HostArray a(Shape{DType::f64, shape.dims});
  auto v = a.mutable_view<double>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = height * std::sin(1.7 * static_cast<double>(i) + phase);
  return a.cast(shape.dtype);
}

/// Three segments whose lengths differ between samples; all have keys before kLengths.
int32_t segment(int64_t sample, int64_t at, int64_t length) {
  const int64_t part = length / (sample ? 12 : 4);
  return at < part ? 7 : at < 2 * part ? 3 : 9;
}
HostArray segments(int64_t length) {
  std::vector<int32_t> all;
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t i = 0; i < length; ++i) all.push_back(segment(b, i, length));
  return HostArray::of<int32_t>({DType::s32, {2, length}}, all);
}
HostArray bias_of_keys(const Case& c) { return wave({DType::f32, {2, c.lk}}, 0.7); }

LocalAttention how(const Case& c, Graph& g) {
  const auto position = [&](int64_t at) {
    return at ? constant(g, HostArray::of<int32_t>({DType::s32, {}}, std::vector<int32_t>{static_cast<int32_t>(at)}))
              : Tensor();
  };
  return {.scale = 0.9 / std::sqrt(static_cast<double>(c.head_dim)),
          .precision = Precision::highest,
          .blocks = c.blocks,
          .causal = c.causal,
          .first_query = position(c.first_query),
          .first_key = position(c.first_key),
          .keys = c.keys,
          .lengths = c.with_lengths ? constant(g, HostArray::of<int32_t>({DType::s32, {2}},
                                                                         std::vector<int32_t>(kLengths, kLengths + 2)))
                                    : Tensor(),
          .key_bias = c.key_bias ? constant(g, bias_of_keys(c)) : Tensor(),
          .query_segments = c.segments ? constant(g, segments(c.lq)) : Tensor(),
          .key_segments = c.segments ? constant(g, segments(c.lk)) : Tensor()};
}

/// y, log-sum-exp, and the gradients of q, k, v and the bias of Σ y · dy, in double.
std::vector<std::vector<double>> expected(const Case& c, const std::vector<HostArray>& in) {
  const auto Q = in[0].to_doubles(), K = in[1].to_doubles(), V = in[2].to_doubles(), G = in[3].to_doubles();
  const double scale = 0.9 / std::sqrt(static_cast<double>(c.head_dim));
  const int64_t D = c.head_dim, group = c.heads / c.kv_heads;
  std::vector<std::vector<double>> out = {
      std::vector<double>(Q.size()), std::vector<double>(static_cast<size_t>(2 * c.heads * c.lq)),
      std::vector<double>(Q.size()), std::vector<double>(K.size()),
      std::vector<double>(V.size()), std::vector<double>(static_cast<size_t>(2 * c.lk))};
  const std::vector<double> bias =
      c.key_bias ? bias_of_keys(c).to_doubles() : std::vector<double>(static_cast<size_t>(2 * c.lk));
  const auto row = [&](int64_t b, int64_t l, int64_t h, int64_t length, int64_t heads) {
    return static_cast<size_t>(((b * length + l) * heads + h) * D);
  };
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < c.lq; ++i) {
        const size_t q = row(b, i, h, c.lq, c.heads);
        std::vector<double> s(static_cast<size_t>(c.lk), -HUGE_VAL);
        double most = -HUGE_VAL, total = 0, slope = 0;
        for (int64_t j = 0; j < c.lk; ++j) {
          const int64_t at = j + c.first_key;
          if ((c.causal && at > i + c.first_query) || (c.keys >= 0 && at >= c.keys) ||
              (c.with_lengths && at >= kLengths[b]) || (c.segments && segment(b, i, c.lq) != segment(b, j, c.lk)))
            continue;
          double dot = 0;
          const size_t k = row(b, j, h / group, c.lk, c.kv_heads);
          for (int64_t d = 0; d < D; ++d) dot += Q[q + static_cast<size_t>(d)] * K[k + static_cast<size_t>(d)];
          s[static_cast<size_t>(j)] = scale * dot + bias[static_cast<size_t>(b * c.lk + j)];
          most = std::max(most, s[static_cast<size_t>(j)]);
        }
        for (double& x : s) total += x = std::isinf(x) ? 0 : std::exp(x - most);
        out[1][static_cast<size_t>((b * c.heads + h) * c.lq + i)] = most + std::log(total);
        std::vector<double> dp(s.size());
        for (int64_t j = 0; j < c.lk; ++j) {
          const size_t k = row(b, j, h / group, c.lk, c.kv_heads), n = static_cast<size_t>(j);
          s[n] = total > 0 ? s[n] / total : 0;
          for (size_t d = 0; d < static_cast<size_t>(D); ++d) {
            out[0][q + d] += s[n] * V[k + d];
            out[4][k + d] += s[n] * G[q + d];
            dp[n] += G[q + d] * V[k + d];
          }
          slope += s[n] * dp[n];
        }
        for (int64_t j = 0; j < c.lk; ++j) {
          const size_t k = row(b, j, h / group, c.lk, c.kv_heads), n = static_cast<size_t>(j);
          out[5][static_cast<size_t>(b * c.lk + j)] += s[n] * (dp[n] - slope);
          for (size_t d = 0; d < static_cast<size_t>(D); ++d) {
            out[2][q + d] += scale * s[n] * (dp[n] - slope) * K[k + d];
            out[3][k + d] += scale * s[n] * (dp[n] - slope) * Q[q + d];
          }
        }
      }
  return out;
}

void expect_near(const HostArray& is, const std::vector<double>& expected, double tolerance, const std::string& what) {
  const auto x = is.to_doubles();
  ASSERT_EQ(x.size(), expected.size()) << what;
  double most = 0, error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(std::isfinite(x[i])) << what << " at " << i;
    if (!std::isfinite(expected[i])) {
      ASSERT_LT(x[i], -1e28) << what << " at " << i;  // a query without keys: adds nothing when merged
      continue;
    }
    most = std::max(most, std::abs(expected[i]));
    error = std::max(error, std::abs(x[i] - expected[i]));
  }
  EXPECT_LT(error, tolerance * std::max(most, 0.1)) << what;
}

/// Chips whose matrix unit has 128 or 256 rows, and GPUs.
const char* const kKinds[] = {"TPU v5", "TPU v6 lite", "NVIDIA H100"};

// S0-41, S0-43…45, S0-49, S0-50, S0-52…54
TEST(TileAttention, IsAttention) {
  using Fused = AttentionBlocks::Fused;
  for (const char* kind : kKinds)
    for (const Case& c : kCases) {
      if (kind == kKinds[1] && c.head_dim != 128) continue;  // otherwise both TPUs have the same kernels
      GraphOptions o = one_device().graph_options();
      o.device_kind = kind;
      Graph g(o);
      std::vector<HostArray> in;
      std::vector<Tensor> x;
      for (const Shape& s : shapes(c)) {
        in.push_back(wave(s, 0.3 + static_cast<double>(in.size())));
        x.push_back(g.input(std::to_string(in.size()), s));
      }
      LocalAttention local = how(c, g);
      const AttentionResult r = tile_attention(x[0], x[1], x[2], local);
      g.output("y", r.y);
      g.output("lse", r.lse);
      EXPECT_EQ(r.y.dtype(), c.type);
      for (const Fused fused : {Fused::yes, Fused::no}) {  // gradients by one kernel and by two
        local.blocks.fused_gradient = fused;
        const AttentionGradient d = tile_attention_gradient(x[0], x[1], x[2], r.y, r.lse, x[3], local);
        for (const auto& [name, t] : {std::pair{"q", d.q}, {"k", d.k}, {"v", d.v}})
          g.output(name + std::string(fused == Fused::yes ? " fused" : " apart"), t);
        g.output(fused == Fused::yes ? "bias fused" : "bias apart", c.key_bias ? d.key_bias : x[0]);
      }
      const auto out = evaluate(one_device(), g, in);
      const auto should = expected(c, in);
      const std::string what = std::string(kind) + ", " + c.name;
      expect_near(out[0], should[0], c.type == DType::f32 ? 2e-5 : 1.5e-2, what + ": y");
      expect_near(out[1], should[1], c.type == DType::f32 ? 2e-5 : 4e-3, what + ": log-sum-exp");
      for (size_t i = 0; i < 8; ++i)
        if (i % 4 < 3 || c.key_bias)
          expect_near(out[2 + i], should[2 + i % 4], c.type == DType::f32 ? 3e-5 : 3e-2,
                      what + (i < 4 ? ", fused" : ", apart") + ": gradient " + "qkvb"[i % 4]);
    }
}

/// Forward and gradient of a case on a chip of 16 MiB, whose fused kernel keeps some 5,400 queries of 256 float32.
std::vector<Tensor> on_small_chip(const Case& c, Graph& g, const std::vector<Tensor>& x, AttentionBlocks::Fused fused) {
  LocalAttention local = how(c, g);
  local.blocks.fused_gradient = fused;
  const AttentionResult r = tile_attention(x[0], x[1], x[2], local);
  const AttentionGradient d = tile_attention_gradient(x[0], x[1], x[2], r.y, r.lse, x[3], local);
  return {d.q, d.k, d.v, c.key_bias ? d.key_bias : x[0]};
}
std::vector<Tensor> inputs_of(Graph& g, const Case& c) {
  std::vector<Tensor> x;
  for (const Shape& s : shapes(c)) x.push_back(g.input(std::to_string(x.size()), s));
  return x;
}

TEST(TileAttention, GradientsOfMoreQueriesThanFitAreSumsOfParts) {
  const AttentionBlocks blocks{.queries = 512, .keys = 128, .keys_compute = 128};
  for (const Case& c :
       {Case{"causal, bias of keys", 6000, 128, 256, DType::f32, true, false, 0, 5800, -1, 1, 1, true, false, blocks},
        Case{"segments, tails", 5801, 70, 256, DType::f32, false, false, 0, 0, -1, 1, 1, false, true, blocks}}) {
    GraphOptions o = one_device().graph_options();
    o.device_kind = "an unknown TPU";
    Graph g(o);
    const std::vector<Tensor> x = inputs_of(g, c);
    EXPECT_THROW(on_small_chip(c, g, x, AttentionBlocks::Fused::yes), Error) << "it fits as a whole";
    int n = 0;
    for (Tensor t : on_small_chip(c, g, x, AttentionBlocks::Fused::automatic)) g.output("d" + std::to_string(n++), t);
    std::vector<HostArray> in;
    for (const Shape& s : shapes(c)) in.push_back(wave(s, 0.3 + static_cast<double>(in.size())));
    const auto out = evaluate(one_device(), g, in);
    const auto should = expected(c, in);
    for (size_t i = 0; i < 4; ++i)
      if (i < 3 || c.key_bias)
        expect_near(out[i], should[2 + i], 3e-5, std::string(c.name) + ": gradient " + "qkvb"[i]);
  }
}

// Five products for each block of logits, not the seven of two kernels.
TEST(TileAttention, OfManyQueriesCallsTheFusedKernelForEachPart) {
  GraphOptions o;
  o.platform = Platform::tpu;
  Graph g(o);
  const Case c{"parts", 12000, 128,   256,   DType::f32,
               false,   false, 0,     0,     -1,
               1,       1,     false, false, {.queries = 512, .keys = 128, .keys_compute = 128}};
  int n = 0;
  for (Tensor t : on_small_chip(c, g, inputs_of(g, c), AttentionBlocks::Fused::automatic))
    g.output("d" + std::to_string(n++), t);
  const std::string module = to_stablehlo(g);
  constexpr std::string_view kFlops = R"(\"flops\": )";
  std::vector<double> flops;
  for (size_t at = 0; (at = module.find(kFlops, at)) != std::string::npos; ++at)
    flops.push_back(std::stod(module.substr(at + kFlops.size())));
  const double product = 2.0 * 2 * 12096 * 128 * 256;  // 24 blocks of 504 queries
  ASSERT_EQ(flops.size(), 5U) << "forward and four parts";
  EXPECT_EQ(flops[0], 2 * product);
  EXPECT_EQ(flops[1] + flops[2] + flops[3] + flops[4], 5 * product);
}

TileAttention sizes(const Case& c, const std::string& kind) {
  return {.batch = 2,
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .queries = c.lq,
          .keys = c.lk,
          .head_dim = tile_head_dim(c.head_dim, tile_chip(kind)),
          .type = c.type,
          .scale = 0.1,
          .causal = c.causal,
          .exact = c.type == DType::f32,
          .limited = c.with_lengths || c.first_query || c.first_key || c.keys >= 0,
          .key_bias = c.key_bias,
          .segments = c.segments,
          .blocks = c.blocks,
          .chip = tile_chip(kind)};
}

/// The kernels of every `stride`-th case from `first` on.
std::vector<tiles::Program> programs_for(const std::string& kind, size_t first = 0, size_t stride = 1) {
  std::vector<tiles::Program> all;
  for (size_t i = first; i < std::size(kCases); i += stride) {
    const TileAttention a = sizes(kCases[i], kind);
    all.push_back(tile_attention_program(a));
    for (const TileGradient part : {TileGradient::fused, TileGradient::dq, TileGradient::dkv})
      if (part != TileGradient::fused || !a.chip.is_gpu) all.push_back(tile_gradient_program(a, part));
  }
  return all;
}

// S0-41, S0-43…45, S0-49, S0-50, S0-52…54
TEST(TileAttention, CompilesForEveryTpu) {
  if (const std::string missing = no_compiler("tpu"); !missing.empty()) GTEST_SKIP() << missing;
  expect_compiled(kTpus, [](const std::string& kind) { return programs_for(kind); });
}

TEST(TileAttention, CompilesForGpus) {
  if (const std::string missing = no_compiler("gpu"); !missing.empty()) GTEST_SKIP() << missing;
  for (size_t i = 0; i < std::size(kGpus); ++i)
    expect_compiled(std::span(kGpus).subspan(i, 1),
                    [&](const std::string& kind) { return programs_for(kind, i, std::size(kGpus)); });
}

/// The kernels with arbitrary arrays of their own layouts.
TEST(TileAttention, OfTritonIsThatOfStableHlo) {
  for (const tiles::Program& p : programs_for("NVIDIA", 1, 2)) {
    std::vector<HostArray> in;
    for (const tiles::Memory& m : p.memories()) {
      if (m.space >= tiles::Space::output) continue;
      const double phase = 0.3 + static_cast<double>(in.size());
      if (m.array.dtype != DType::s32) {
        HostArray x = wave(m.array, phase, 0.5);
        if (m.name == "lse")  // near those of the logits
          for (float& v : x.mutable_view<float>()) v += 4;
        in.push_back(x);
        continue;
      }
      std::vector<int32_t> numbers;  // limits: a position and the keys of two samples; or segments
      if (m.space == tiles::Space::scalars)
        numbers = {170, 300, 130};
      else
        for (int64_t i = 0; i < m.array.elements(); ++i) numbers.push_back(i / 40 % 3 ? 7 : 3);
      in.push_back(HostArray::of<int32_t>(m.array, numbers));
    }
    const bool is_half = p.results()[0].dtype == DType::bf16;
    expect_same_from_triton(p, in, is_half ? 3e-2 : 3e-5);
  }
}

/// Attention with keys and its gradient, as the table's first row that takes it.
std::string module_for_gpu(DType type, int64_t head_dim) {
  GraphOptions o;
  o.platform = Platform::gpu;
  o.nvidia_kernels = true;
  Graph g(o);
  const Shape shape{type, {2, 512, 4, head_dim}};
  Tensor q = g.input("q", shape), k = g.input("k", shape), v = g.input("v", shape), dy = g.input("dy", shape);
  const LocalAttention local{.scale = 0.1, .lengths = g.input("lengths", {DType::s32, {2}})};
  const AttentionResult r = local_attention(q, k, v, local);
  const AttentionGradient d = local_attention_gradient(q, k, v, r.y, r.lse, dy, local);
  for (const auto& [name, t] : {std::pair{"y", r.y}, {"dq", d.q}, {"dk", d.k}, {"dv", d.v}}) g.output(name, t);
  return to_stablehlo(g);
}

TEST(TileAttention, IsUsedOnGpusWhereCudnnIsNot) {
  for (const auto& [type, head_dim] : {std::pair{DType::bf16, 64}, {DType::bf16, 160}, {DType::f32, 40}}) {
    const std::string module = module_for_gpu(type, head_dim);
    size_t calls = 0;
    for (size_t at = 0; (at = module.find("\"__gpu$xla.gpu.triton\"", at)) != std::string::npos; ++at) ++calls;
    EXPECT_EQ(calls, 3u) << to_string(type) << " " << head_dim;  // forward, dq, and dk with dv
    EXPECT_EQ(module.find("stablehlo.dot_general"), std::string::npos) << to_string(type) << " " << head_dim;
  }
}

}  // namespace
}  // namespace md
