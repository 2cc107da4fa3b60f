#include "maxdiffusion/ops/attention.h"

#include <fmt/core.h>

#include <map>
#include <string_view>

#include "maxdiffusion/ops/control_flow.h"
#include "tests/autodiff/gradient_check.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

/// Computes softmax(scale · q·kᵀ + bias) · v on the host in double.
std::vector<double> expected(const std::vector<HostArray>& in, bool causal, double scale, bool bias) {
  const Dims q = in[0].dims(), k = in[1].dims();
  const auto Q = in[0].to_doubles(), K = in[1].to_doubles(), V = in[2].to_doubles();
  const auto B = bias ? in[3].to_doubles() : std::vector<double>();
  const int64_t H = q[2], D = q[3], Lq = q[1], Lk = k[1];
  auto at = [&](int64_t b, int64_t l, int64_t h, int64_t d, int64_t L) {
    return static_cast<size_t>(((b * L + l) * H + h) * D + d);
  };
  std::vector<double> y(Q.size());
  for (int64_t b = 0; b < q[0]; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < Lq; ++i) {
        double total = 0;
        std::vector<double> row(static_cast<size_t>(D));
        for (int64_t j = 0; j < (causal ? i + 1 : Lk); ++j) {
          double s = 0;
          for (int64_t d = 0; d < D; ++d) s += Q[at(b, i, h, d, Lq)] * K[at(b, j, h, d, Lk)];
          const double e = std::exp(scale * s + (bias ? B[static_cast<size_t>(h * Lk + j)] : 0));
          total += e;
          for (int64_t d = 0; d < D; ++d) row[static_cast<size_t>(d)] += e * V[at(b, j, h, d, Lk)];
        }
        for (int64_t d = 0; d < D; ++d) y[at(b, i, h, d, Lq)] = row[static_cast<size_t>(d)] / total;
      }
  return y;
}

class Attention : public testing::TestWithParam<const char*> {
 protected:
  AttentionOptions options() const { return {.kernel = GetParam(), .flash_min_seq_length = 0}; }
};
INSTANTIATE_TEST_SUITE_P(Kernels, Attention, testing::Values("dot_product", "flash"));

std::vector<Shape> shapes(DType t, int64_t lq, int64_t lk) {
  return {{t, {2, lq, 3, 4}}, {t, {2, lk, 3, 4}}, {t, {2, lk, 3, 4}}, {t, {3, 1, lk}}};
}

// S0-1, S0-62, S2-18, S4-17
TEST_P(Attention, IsSoftmaxOfScaledProducts) {
  for (auto [type, tolerance] : {std::pair{DType::f64, 1e-13}, {DType::f32, 2e-6}, {DType::bf16, 2e-2}})
    for (bool causal : {false, true})
      for (bool bias : {false, true}) {
        const double scale = causal ? 0.7 : 0.5;
        Traced traced{shapes(type, 6, causal ? 6 : 5), [&](Graph&, const std::vector<Tensor>& x) {
                        AttentionOptions o = options();
                        o.causal = causal;
                        if (causal) o.scale = 0.7;  // else 1/√4
                        if (bias) o.bias = x[3];
                        return std::vector<Tensor>{attention(x[0], x[1], x[2], o)};
                      }};
        const auto in = traced.inputs();
        const auto out = traced.run(in);
        EXPECT_EQ(out[0].shape(), traced.shapes[0]);
        expect_close(out[0].to_doubles(), expected(in, causal, scale, bias), tolerance,
                     fmt::format("{} causal {} bias {}", to_string(type), causal, bias));
      }
}

TEST_P(Attention, GradientEqualsFiniteDifferences) {
  for (bool causal : {false, true})
    for (bool bias : {false, true})
      check_gradients(shapes(DType::f64, 4, causal ? 4 : 3), [&](Graph&, const std::vector<Tensor>& x) {
        AttentionOptions o = options();
        o.causal = causal;
        if (bias) o.bias = x[3];
        Tensor y = attention(x[0], x[1], x[2], o);
        return sum(square(y) + sin(y)) + sum(x[3]);
      });
}

/// A mask [B, 1, 1, keys]: 0 for the first `lengths` keys of each sample, −1e30 for the others.
HostArray mask_of(const std::vector<int32_t>& lengths, int64_t keys) {
  HostArray mask(f64({std::ssize(lengths), 1, 1, keys}));
  auto v = mask.mutable_view<double>();
  for (size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<int64_t>(i) % keys < lengths[i / static_cast<size_t>(keys)] ? 0 : -1e30;
  return mask;
}
HostArray as_array(const std::vector<int32_t>& lengths) {
  return HostArray::of<int32_t>(Shape{DType::s32, {std::ssize(lengths)}}, lengths);
}

TEST_P(Attention, WithLengthsIsAttentionWithKeysMasked) {
  const std::vector<int32_t> lengths = {4, 7};
  for (const bool causal : {false, true})
    for (const AttentionBlocks& blocks : {AttentionBlocks{}, AttentionBlocks{3, 2}}) {
      auto run = [&](const std::function<void(Graph&, AttentionOptions&)>& with) {
        return with_gradients({f64({2, 7, 3, 4}), f64({2, 7, 3, 4}), f64({2, 7, 3, 4})},
                              [&](Graph& g, const std::vector<Tensor>& x) {
                                AttentionOptions o = options();
                                o.causal = causal;
                                o.blocks = blocks;
                                with(g, o);
                                Tensor y = attention(x[0], x[1], x[2], o);
                                return sum(square(y) + sin(y));
                              })
            .run();
      };
      const auto out = run([&](Graph&g, AttentionOptions&o) { o.lengths = constant(g, as_array(lengths)); }),
                 expected = run([&](Graph&g, AttentionOptions&o) {
                   o.kernel = "dot_product";
                   o.bias = constant(g, mask_of(lengths, 7));
                 });
      for (size_t i = 0; i < out.size(); ++i)
        expect_close(out[i].to_doubles(), expected[i].to_doubles(), 1e-12,
                     fmt::format("causal {}, blocks of {}, output {}", causal, blocks.keys, i));
    }
}

TEST_P(Attention, OfGroupedHeadsIsThatOfRepeatedOnes) {
  const Shape q = f64({2, 5, 6, 4}), k = f64({2, 5, 2, 4});
  auto run = [&](bool grouped) {
    return with_gradients({q, k, k},
                          [&](Graph&, const std::vector<Tensor>& x) {
                            auto repeated = [&](Tensor t) {  // heads 0, 0, 0, 1, 1, 1
                              if (grouped) return t;
                              const Tensor first = slice_axis(t, 2, 0, 1), second = slice_axis(t, 2, 1, 2);
                              return concatenate({first, first, first, second, second, second}, 2);
                            };
                            AttentionOptions o = options();
                            o.causal = true;
                            Tensor y = attention(x[0], repeated(x[1]), repeated(x[2]), o);
                            return sum(square(y) + sin(y));
                          })
        .run();
  };
  const auto out = run(true), expected = run(false);
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(out[i].shape(), expected[i].shape());
    expect_close(out[i].to_doubles(), expected[i].to_doubles(), 1e-13, fmt::format("output {}", i));
  }
}

TEST_P(Attention, RefusesHeadsThatDoNotDivideAndLengthsOfAnotherBatch) {
  Graph g;
  Tensor q = g.input("q", f32({2, 4, 6, 8})), k = g.input("k", f32({2, 4, 4, 8})),
         all = g.input("a", f32({2, 4, 6, 8}));
  auto message = [](const std::function<void()>& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      return e.message();
    }
    return "";
  };
  EXPECT_NE(message([&] { attention(q, k, k, options()); }).find("are not [B, Lq, H, D] and [B, Lk, H / G, D]"),
            std::string::npos);
  AttentionOptions o = options();
  o.lengths = g.input("lengths", Shape{DType::s32, {3}});
  EXPECT_NE(message([&] { attention(q, all, all, o); }).find("expected s32 [2]"), std::string::npos);
}

TEST_P(Attention, BlocksOfQueriesAgree) {  // 1540 queries: two blocks of 770
  Traced traced{{f32({1, 1540, 2, 8}), f32({1, 1540, 2, 8}), f32({1, 1540, 2, 8})},
                [&](Graph&, const std::vector<Tensor>& x) {
                  AttentionOptions o = options();
                  o.causal = true;
                  return std::vector<Tensor>{attention(x[0], x[1], x[2], o)};
                }};
  const auto in = traced.inputs();
  expect_close(traced.run(in)[0].to_doubles(), expected(in, true, 1 / std::sqrt(8.0), false), 1e-5, "blocks");
}

// S0-39, S2-23, S4-21
TEST(AttentionBlocks, OfAnySizeGiveTheSame) {
  auto run = [](AttentionOptions o) {
    o.causal = true;
    o.flash_min_seq_length = 0;
    return with_gradients({f64({2, 30, 3, 4}), f64({2, 30, 3, 4}), f64({2, 30, 3, 4})},
                          [&](Graph&, const std::vector<Tensor>& x) {
                            Tensor y = attention(x[0], x[1], x[2], o);
                            return sum(square(y) + sin(y));
                          })
        .run();
  };
  const auto expected = run({.kernel = "dot_product"});
  for (const AttentionBlocks& blocks :
       {AttentionBlocks{}, AttentionBlocks{7, 8}, AttentionBlocks{30, 10, 4, 15}, AttentionBlocks{1, 1, 64, 64}}) {
    const auto out = run({.kernel = "flash", .blocks = blocks});
    for (size_t i = 0; i < out.size(); ++i)
      expect_close(out[i].to_doubles(), expected[i].to_doubles(), 1e-13,
                   fmt::format("{} by {}, output {}", blocks.queries, blocks.keys, i));
  }
}

// Lengths 29 and 31 are prime: blocks of keys are padded with zeros.
// S0-39
TEST(AttentionBlocks, OfLengthsThatNothingDividesGiveTheSame) {
  for (const bool causal : {false, true}) {
    auto run = [&](const char* kernel, const AttentionBlocks& blocks) {
      const AttentionOptions o{.kernel = kernel, .flash_min_seq_length = 0, .blocks = blocks, .causal = causal};
      return with_gradients({f64({2, 29, 3, 4}), f64({2, 31, 3, 4}), f64({2, 31, 3, 4})},
                            [&](Graph&, const std::vector<Tensor>& x) {
                              Tensor y = attention(x[0], x[1], x[2], o);
                              return sum(square(y) + sin(y));
                            })
          .run();
    };
    const auto expected = run("dot_product", {}), out = run("flash", {7, 8, 10, 9});
    for (size_t i = 0; i < out.size(); ++i)
      expect_close(out[i].to_doubles(), expected[i].to_doubles(), 1e-13,
                   fmt::format("causal {}, output {}", causal, i));
  }
}

std::string from_base64(std::string_view text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int have = 0;
  for (char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == kDigits.npos) break;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if ((have += 6) >= 8) bytes += static_cast<char>(bits >> (have -= 8) & 255U);
  }
  return bytes;
}

/// Kernels, by name, that a program for this kind of TPU calls: attention and gradients of one head of 75,600 tokens.
std::map<std::string, std::string> kernels_on(const std::string& kind, const AttentionBlocks& blocks = {}) {
  GraphOptions on;
  on.platform = Platform::tpu;
  on.device_kind = kind;
  Graph g(on);
  const Shape shape{DType::bf16, {1, 75600, 1, 128}};
  with_gradients({shape, shape, shape}, [&](Graph&, const std::vector<Tensor>& x) {
    return sum(cast(attention(x[0], x[1], x[2], {.kernel = "flash", .blocks = blocks}), DType::f32));
  }).trace(g);
  const std::string program = to_stablehlo(g), body = "\\\"body\\\": \\\"", name = "sym_name = \"";
  std::map<std::string, std::string> found;
  for (size_t at = program.find(body); at != program.npos; at = program.find(body, at + 1)) {
    const std::string text = from_base64(std::string_view(program).substr(at + body.size()));
    const size_t from = text.find(name) + name.size();
    found[text.substr(from, text.find('"', from) - from)] = text;
  }
  return found;
}
/// The blocks of queries and keys in the text of a kernel.
std::string blocks_of(const std::string& kernel) {
  const std::string window = "window_bounds = array<i64: 1, ";
  const size_t q = kernel.find(window) + window.size(), k = kernel.find(window, q) + window.size();
  return kernel.substr(q, kernel.find(',', q) - q) + "x" + kernel.substr(k, kernel.find(',', k) - k);
}

// S0-41…57, S0-39
TEST(AttentionBlocks, DefaultsOfChipsAreTheDocumentedOnes) {
  auto trillium = kernels_on("TPU v6 lite"), v5p = kernels_on("TPU v5"), other = kernels_on("TPU v4");
  EXPECT_EQ(blocks_of(trillium["attention"]), "3024x2048");
  EXPECT_EQ(count(trillium["attention"], "vector<3024x1024xf32>") > 0, true);  // block_kv_compute
  // One kernel for gradients, of the sizes for dk and dv, rounded to equal blocks of a part: two parts of 37,800
  // queries in 13 blocks, three of 25,200 in 25.
  EXPECT_EQ(blocks_of(trillium["attention_gradient"]), "2912x2048");
  EXPECT_EQ(blocks_of(v5p["attention"]), "3024x2048");
  EXPECT_EQ(blocks_of(v5p["attention_gradient"]), "1008x3072");
  EXPECT_GT(count(v5p["attention_gradient"], "vector<256x1008xf32>"), 0);  // block_kv_dkv_compute
  EXPECT_FALSE(v5p.contains("attention_dq"));
  EXPECT_EQ(blocks_of(other["attention"]), "1024x1024");
}

// S0-42, S0-46…48, S0-51, S0-55…57
TEST(AttentionBlocks, OfTheKeysAreThoseOfKernels) {
  using Fused = AttentionBlocks::Fused;
  auto blocks = kernels_on("TPU v5", {512, 768, 256, 1280, 384, 640, 128, 896, Fused::no});
  EXPECT_EQ(blocks_of(blocks["attention"]), "512x768");
  EXPECT_GT(count(blocks["attention"], "vector<512x384xf32>"), 0);
  EXPECT_EQ(blocks_of(blocks["attention_dkv"]), "256x1280");
  EXPECT_GT(count(blocks["attention_dkv"], "vector<640x256xf32>"), 0);
  EXPECT_EQ(blocks_of(blocks["attention_dq"]), "128x896");
  EXPECT_FALSE(blocks.contains("attention_gradient"));
}

TEST(AttentionBlocks, ThatNoKernelHasAreRefusedWithTheNearestThatOneHas) {
  using Fused = AttentionBlocks::Fused;
  for (const auto& [blocks, expected] :
       {std::pair{AttentionBlocks{.queries = 1000},
                  "flash_block_sizes: block_q is 1000; expected a multiple of 16\ntry: block_q: 1008"},
        {AttentionBlocks{.queries = 512, .keys = 1000},
         "flash_block_sizes: block_kv is 1000; expected a multiple of 128\ntry: block_kv: 1024"},
        {AttentionBlocks{.keys = 1024, .keys_compute = 384},
         "flash_block_sizes: block_kv_compute is 384, which does not divide block_kv of 1024\ntry: block_kv_compute: "
         "256"},
        {AttentionBlocks{.queries = 75600, .keys = 2048, .keys_compute = 2048},
         "flash_block_sizes: block_q is 75600; the kernel's blocks take"},
        {AttentionBlocks{.queries = 512, .keys = 512, .fused_gradient = Fused::yes},
         "flash_block_sizes: use_fused_bwd_kernel is true; for 75600 queries it takes"}}) {
    try {
      kernels_on("TPU v5", blocks);
      ADD_FAILURE() << expected;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      std::string what = e.what();
      std::erase(what, ' ');
      std::string start = expected;
      std::erase(start, ' ');
      EXPECT_TRUE(what.starts_with(start)) << e.what();
    }
  }
}

TEST(AttentionBlocks, NoEffectIsLoggedIfAKernelChooses) {
  GraphOptions on;
  on.platform = Platform::gpu;
  on.nvidia_kernels = true;
  Graph g(on);
  const Shape shape{DType::bf16, {1, 512, 2, 64}};
  testing::internal::CaptureStderr();
  attention(g.input("q", shape), g.input("k", shape), g.input("v", shape), {.kernel = "flash", .blocks = {512, 512}});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("flash_block_sizes is ignored where attention is cuDNN"), log.npos) << log;
}

// S0-61, S2-18, S4-17
TEST(AttentionTable, FlashKeepsNoLogits) {
  auto temporary = [](const char* kernel) {
    Graph g;
    with_gradients({f32({1, 1024, 8, 32}), f32({1, 1024, 8, 32}), f32({1, 1024, 8, 32})},
                   [&](Graph&, const std::vector<Tensor>& x) {
                     return sum(square(attention(x[0], x[1], x[2], {.kernel = kernel})));
                   })
        .trace(g);
    return compile(devices(), g, {.jax_cache_dir = "off"}, "attention").memory()->temporary;
  };
  // dot_product keeps logits, 32 times an array of the sequence, forward and backward. Flash needs at most the result,
  // its gradient, those of three inputs, and heads-first copies of eight such arrays.
  const int64_t array = int64_t{1024} * 8 * 32 * 4, logits = 8 * int64_t{1024} * 1024 * 4, flash = temporary("flash"),
                whole = temporary("dot_product");
  fmt::print("  flash {} arrays of a sequence, dot_product {}, logits {}\n", static_cast<double>(flash) / array,
             static_cast<double>(whole) / array, logits / array);
  EXPECT_GE(whole, logits);
  EXPECT_LT(flash, logits / 2);
}

// As on a CPU plugin that cannot call our kernels; images of 1024 pixels have such lengths.
TEST(AttentionTable, OfACpuKeepsNoLogitsThatFillItsMemory) {
  auto stores_logits = [](Platform platform, int64_t length) {
    GraphOptions on;
    on.platform = platform;
    Graph g(on);
    const Shape shape = f32({1, length, 1, 8});
    const Tensor q = g.input("q", shape), k = g.input("k", shape), v = g.input("v", shape);
    g.output("y", attention(q, k, v, {.kernel = "dot_product"}));
    return to_stablehlo(g).find(fmt::format("{0}x{0}x", length)) != std::string::npos;
  };
  EXPECT_TRUE(stores_logits(Platform::cpu, 1024));
  EXPECT_FALSE(stores_logits(Platform::cpu, 16384));
  EXPECT_TRUE(stores_logits(Platform::tpu, 16384)) << "which may be told attention=flash";
}

// One layer has 8 MiB of logits and 0.25 MiB of queries.
TEST(AttentionTable, DotProductKeepsNoLogitsForTheWayBack) {
  auto temporary = [](int layers) {
    Graph g;
    const Shape shape = f64({1, 512, 4, 16});  // f64: composed operations
    with_gradients({shape}, [&](Graph&, const std::vector<Tensor>& x) {
      Tensor y = x[0];
      for (int i = 0; i < layers; ++i) y = attention(y, y, y, {.kernel = "dot_product"});
      return sum(square(y));
    }).trace(g);
    return compile(devices(), g, {.jax_cache_dir = "off"}, "attention").memory()->temporary;
  };
  const auto few = temporary(4), many = temporary(8);
  EXPECT_LT((many - few) / 4, 2 << 20) << few << " " << many;
}

TEST(AttentionTable, DotProductInALoopSharesLogitsWithRecomputation) {
  auto barriers = [](bool loop) {
    GraphOptions on;
    on.platform = Platform::tpu;
    Graph g(on);
    with_gradients({f32({1, 8, 2, 4})}, [&](Graph&, const std::vector<Tensor>& x) {
      auto layer = [](Tensor y) { return attention(y, y, y, {.kernel = "dot_product"}); };
      if (!loop) return sum(layer(x[0]));
      return sum(scan(3, {x[0]}, [&](ScanStep&, const std::vector<Tensor>& y) {
                   return ScanResult{{layer(y[0])}, {}};
                 }).carry[0]);
    }).trace(g);
    return count(to_stablehlo(g), "stablehlo.optimization_barrier");
  };
  EXPECT_EQ(barriers(false), 1);
  EXPECT_EQ(barriers(true), 0);
}

// S0-62, S2-22
TEST(AttentionTable, LogsOnceThatFlashIsDotProduct) {
  auto message = [](int64_t devices, AttentionOptions o) {
    GraphOptions options;
    if (devices > 1) options.mesh_axes = {{"data", devices}};
    Graph g(options);
    Tensor q = g.input("q", f32({2, 512, 2, 8})), bias = g.input("bias", f32({512, 512}));
    if (o.causal) o.bias = bias;
    testing::internal::CaptureStderr();
    attention(q, q, q, o);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(message(1, {.kernel = "flash"}), "");
  EXPECT_EQ(message(2, {.kernel = "dot_product"}), "");
  const std::string first = message(2, {.kernel = "flash"});
  EXPECT_NE(first.find("attention=flash: dot_product is used where the model sets no "
                       "logical axes of attention"),
            std::string::npos)
      << first;
  EXPECT_EQ(message(2, {.kernel = "flash"}), "");
  EXPECT_NE(message(2, {.kernel = "tokamax_flash"}).find("attention=tokamax_flash: dot_product"), std::string::npos);
  EXPECT_EQ(message(1, {.kernel = "flash", .flash_min_seq_length = 512}), "");  // the length itself
  EXPECT_NE(message(1, {.kernel = "flash", .flash_min_seq_length = 513}).find("where a length is below"),
            std::string::npos);
  EXPECT_NE(message(1, {.kernel = "flash", .causal = true}).find("where there is a bias"), std::string::npos);
}

// S4-17
TEST(AttentionTable, NamesItsKernelsAndShapes) {
  Graph g;
  Tensor q = g.input("q", f32({1, 4, 2, 8})), k = g.input("k", f32({1, 4, 3, 8}));
  try {
    attention(q, q, q, {.kernel = "splash"});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(e.message().find("flash, dot_product"), std::string::npos) << e.what();
  }
  EXPECT_THROW(attention(q, k, k), Error);
}

}  // namespace
}  // namespace md
