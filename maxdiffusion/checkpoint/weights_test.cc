#include "maxdiffusion/checkpoint/weights.h"

#include <gtest/gtest.h>

#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

HostArray counting(Dims dims, float first = 0) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  auto v = a.mutable_view<float>();
  std::iota(v.begin(), v.end(), first);
  return a;
}
WantedWeight f32(const std::string& name, Dims dims) { return {name, Shape{DType::f32, std::move(dims)}}; }
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Weights : public testing::Test {
 protected:
  void file(const HostArrays& tensors) { write_safetensors(t / "model.safetensors", tensors); }
  auto load(const std::vector<WantedWeight>& expected, const LoadOptions& o = {}) {
    return load_weights(t.path(), expected, o);
  }
  std::string error_of(const std::vector<WantedWeight>& expected, const LoadOptions& o = {}) {
    try {
      load(expected, o);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::io);
      return e.what();
    }
    return "no error";
  }
  TemporaryFolder t;
};

TEST_F(Weights, AreMatchedByName) {
  file({{"a.weight", counting({2, 3})}, {"text_model.embeddings.position_ids", counting({1, 77})}});
  auto w = load({f32("a.weight", {2, 3})});
  ASSERT_EQ(w.size(), 1u);
  EXPECT_EQ(w.at("a.weight").to_doubles(), counting({2, 3}).to_doubles());
}

TEST_F(Weights, MissingUnusedAndMisshapenAreReportedTogether) {
  file({{"conv_in.weight", counting({4, 4})}, {"conv_out.wieght", counting({4})}, {"odd.bias", counting({1})}});
  const std::string e = error_of({f32("conv_in.weight", {4, 8}), f32("conv_out.weight", {4})});
  EXPECT_TRUE(has(e, "1 missing, 2 unused, 1 of another shape")) << e;
  EXPECT_TRUE(has(e, "missing: conv_out.weight")) << e;
  EXPECT_TRUE(has(e, "unused: conv_out.wieght, odd.bias")) << e;
  EXPECT_TRUE(has(e, "'conv_in.weight' is f32[4,4] in '" + t.path() + "/model.safetensors'; the model needs f32[4,8]"))
      << e;
  EXPECT_TRUE(has(e, "nearest to 'conv_out.weight' in the file: 'conv_out.wieght'")) << e;
}

TEST_F(Weights, AFileOfAnotherComponentIsNoMatterOfTheConfig) {
  file({{"vae.conv.weight", counting({1})}});
  const std::vector<WantedWeight> expected = {f32("unet.weight", {1}), f32("unet.bias", {1})};
  const std::string e = error_of(expected);
  EXPECT_TRUE(has(e, "try: another file: '" + t.path() + "' has none of this component's weights")) << e;
  EXPECT_FALSE(has(e, "config.json")) << e;
  file({{"unet.weight", counting({1})}});
  EXPECT_TRUE(has(error_of(expected), "try: compare the config.json"));
}

TEST_F(Weights, LongListsAreCounted) {
  file({});
  std::vector<WantedWeight> many;
  for (int i = 0; i < 25; ++i) many.push_back(f32("w." + std::to_string(i), {1}));
  EXPECT_TRUE(has(error_of(many), "and 15 more"));
}

TEST_F(Weights, UnusedMayBeAllowed) {
  file({{"a", counting({1})}, {"b", counting({1})}});
  EXPECT_TRUE(has(error_of({f32("a", {1})}), "unused: b"));
  EXPECT_EQ(load({f32("a", {1})}, {.allow_unused = true}).size(), 1u);
}

TEST_F(Weights, OlderNamesAreKnown) {
  file({{"text_model.final_layer_norm.weight", counting({4})},
        {"encoder.mid_block.attentions.0.query.weight", counting({2, 2, 1, 1})},
        {"encoder.mid_block.attentions.0.key.weight", counting({2, 2})},
        {"encoder.mid_block.attentions.0.value.bias", counting({2})},
        {"encoder.mid_block.attentions.0.proj_attn.weight", counting({2, 2, 1, 1})}});
  auto w = load({f32("final_layer_norm.weight", {4}), f32("encoder.mid_block.attentions.0.to_q.weight", {2, 2}),
                 f32("encoder.mid_block.attentions.0.to_k.weight", {2, 2}),
                 f32("encoder.mid_block.attentions.0.to_v.bias", {2}),
                 f32("encoder.mid_block.attentions.0.to_out.0.weight", {2, 2})});
  EXPECT_EQ(w.at("encoder.mid_block.attentions.0.to_q.weight").dims(), (Dims{2, 2}));
  file({{"final_layer_norm.weight", counting({4})}});
  EXPECT_EQ(load({f32("text_model.final_layer_norm.weight", {4})}).size(), 1u);
  file({{"pre_layrnorm.weight", counting({4})}});
  EXPECT_EQ(load({f32("vision_model.pre_layrnorm.weight", {4})}).size(), 1u);
}

TEST_F(Weights, OneEmbeddingMayStandUnderBothOfItsNamesOrEither) {
  const std::string shared = "shared.weight", tied = "encoder.embed_tokens.weight";
  for (const auto& names : {std::vector{shared}, std::vector{tied}, std::vector{shared, tied}}) {
    HostArrays arrays;
    for (const std::string& name : names) arrays[name] = counting({2, 2});
    file(arrays);
    EXPECT_EQ(load({f32(shared, {2, 2})}).at(shared).to_doubles(), (std::vector<double>{0, 1, 2, 3}));
  }
}

TEST_F(Weights, FloatsAreConvertedAndIntegersAreNot) {
  file({{"a", counting({3}).cast(DType::f16)}});
  EXPECT_EQ(load({f32("a", {3})}).at("a").to_doubles(), (std::vector<double>{0, 1, 2}));
  EXPECT_TRUE(has(error_of({{"a", Shape{DType::s32, {3}}}}), "f16[3]"));
}

TEST_F(Weights, LayersAreStackedAndUnstacked) {
  file({{"blocks.0.w", counting({2}, 0)}, {"blocks.1.w", counting({2}, 2)}, {"blocks.2.w", counting({2}, 4)}});
  auto stack = load({f32("blocks.*.w", {3, 2})}).at("blocks.*.w");
  EXPECT_EQ(stack.to_doubles(), (std::vector<double>{0, 1, 2, 3, 4, 5}));
  EXPECT_TRUE(has(error_of({f32("blocks.*.w", {2, 2})}), "unused: blocks.2.w"));
  EXPECT_TRUE(has(error_of({f32("blocks.*.w", {4, 2})}), "missing: blocks.3.w"));
  auto layers = unstacked("blocks.*.w", stack);
  ASSERT_EQ(layers.size(), 3u);
  EXPECT_EQ(layers.at("blocks.1.w").to_doubles(), (std::vector<double>{2, 3}));
  EXPECT_EQ(unstacked("plain", stack).count("plain"), 1u);
}

TEST(Unstacked, ShardsOfAStackAreShardsOfItsLayers) {
  const ShardedArray stack = counting({4, 2, 6}, 0);
  const Slice lower{{1, 0, 0}, {2, 2, 3}}, upper{{3, 0, 3}, {1, 2, 3}};
  const NamedShards layers =
      unstacked("blocks.*.w", ShardedArray(stack.shape, {{lower, stack.read(lower)}, {upper, stack.read(upper)}}));
  ASSERT_EQ(layers.size(), 4u);
  EXPECT_TRUE(layers.at("blocks.0.w").shards.empty());
  EXPECT_EQ(layers.at("blocks.0.w").shape.dims, (Dims{2, 6}));
  for (int64_t i : {1, 2, 3}) {
    const int64_t half = i == 3 ? 3 : 0;
    const ShardedArray& layer = layers.at("blocks." + std::to_string(i) + ".w");
    ASSERT_EQ(layer.shards.size(), 1u);
    EXPECT_EQ(layer.read({{0, half}, {2, 3}}).to_doubles(), stack.read({{i, 0, half}, {1, 2, 3}}).to_doubles());
    EXPECT_THROW(layer.whole(), Error);
  }
}

}  // namespace
}  // namespace md
