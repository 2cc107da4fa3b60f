// Traces the published models: parameter names, shapes and counts, and the FLOPs of one call.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <set>
#include <sstream>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/qwen_image_transformer.h"
#include "maxdiffusion/models/step_reuse.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_vae.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

struct Full {
  const char* name;
  int64_t parameters;
  size_t tensors;
  double flops;  // of the call traced here, by torch.utils.flop_counter
  void (*trace)(const Scope&, const nlohmann::json&);
};
void PrintTo(const Full& f, std::ostream* os) { *os << f.name; }

void trace_unet(const Scope& s, const nlohmann::json& json) {
  const UNetConfig c = UNetConfig::from_json(json);
  Graph& g = s.graph();
  UNetInputs in{.sample = g.input("sample", {DType::f32, {1, 16, 16, c.in_channels}}),
                .timestep = g.input("t", {DType::f32, {1}}),
                .encoder_hidden_states = g.input("text", {DType::f32, {1, 77, c.cross_attention_dim[0]}})};
  if (c.addition_embed_type) {
    in.text_embeds =
        g.input("pooled", {DType::f32, {1, c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim}});
    in.time_ids = g.input("ids", {DType::f32, {1, 6}});
  }
  EXPECT_EQ(to_string(unet2d(s, c, in).shape()), "f32[1,16,16,4]");
}

void trace_vae(const Scope& s, const nlohmann::json& json) {
  const VaeConfig c = VaeConfig::from_json(json);
  const Posterior p = vae_encode(s, c, s.graph().input("pixels", {DType::f32, {1, 32, 16, 3}}));
  EXPECT_EQ(p.mean.dims(), (Dims{1, 4, 2, c.latent_channels}));
  EXPECT_EQ(to_string(vae_decode(s, c, p.mean).shape()), "f32[1,32,16,3]");
}

void trace_wan_vae(const Scope& s, const nlohmann::json& json) {
  const WanVaeConfig c = WanVaeConfig::from_json(json);
  const Posterior p = wan_vae_encode(s, c, s.graph().input("pixels", {DType::f32, {1, 5, 32, 16, 3}}));
  EXPECT_EQ(p.mean.dims(), (Dims{1, 2, 32 / c.downscale(), 16 / c.downscale(), c.z_dim}));
  EXPECT_EQ(to_string(wan_vae_decode(s, c, p.mean).shape()), "f32[1,5,32,16,3]");
}

void trace_clip(const Scope& s, const nlohmann::json& json) {
  clip_text(s, ClipTextConfig::from_json(json), s.graph().input("ids", {DType::s32, {1, 77}}));
}

void trace_vision(const Scope& s, const nlohmann::json& json) {
  const ClipVisionOutput y =
      clip_vision(s, ClipVisionConfig::from_json(json), s.graph().input("pixels", {DType::f32, {1, 224, 224, 3}}));
  EXPECT_EQ(to_string(y.hidden_states.end()[-2].shape()), "f32[1,257,1280]");
}

void trace_t5_64(const Scope& s, const nlohmann::json& json) {
  const Shape tokens{DType::s32, {1, 64}};
  t5_encoder(s, T5Config::from_json(json), s.graph().input("ids", tokens), s.graph().input("mask", tokens));
}

void trace_wan(const Scope& s, const nlohmann::json& json, Dims times) {
  const WanTransformerConfig c = WanTransformerConfig::from_json(json);
  Graph& g = s.graph();
  WanInputs in{.sample = g.input("sample", {DType::f32, {1, 2, 8, 12, c.in_channels}}),
               .timestep = g.input("t", {DType::f32, std::move(times)}),
               .text = g.input("text", {DType::f32, {1, 512, c.text_dim}})};
  if (c.image_dim) in.image = g.input("image", {DType::f32, {1, c.pos_embed_seq_len.value_or(257), *c.image_dim}});
  StepReuse reuse;
  in.reuse = &reuse;
  const Tensor sample = wan_transformer(s, c, in);
  EXPECT_EQ(to_string(sample.shape()), fmt::format("f32[1,2,8,12,{}]", c.out_channels));
  EXPECT_EQ(to_string(reuse.arrays.at(0).shape()), fmt::format("f32[1,48,{}]", c.width()));
}
void trace_wan_of_one_time(const Scope& s, const nlohmann::json& json) { trace_wan(s, json, {1}); }
void trace_wan_of_times(const Scope& s, const nlohmann::json& json) { trace_wan(s, json, {1, 48}); }

/// 256² pixels.
void trace_flux(const Scope& s, const nlohmann::json& json) {
  const FluxTransformerConfig c = FluxTransformerConfig::from_json(json);
  Graph& g = s.graph();
  FluxInputs in{.sample = g.input("sample", {DType::f32, {1, 256, c.in_channels}}),
                .rows = 16,
                .columns = 16,
                .timestep = g.input("t", {DType::f32, {1}}),
                .text = g.input("text", {DType::f32, {1, 512, c.joint_attention_dim}}),
                .pooled = g.input("pooled", {DType::f32, {1, c.pooled_projection_dim}})};
  if (c.guidance_embeds) in.guidance = g.input("guidance", {DType::f32, {1}});
  EXPECT_EQ(to_string(flux_transformer(s, c, in).shape()), "f32[1,256,64]");
}

/// 256² pixels and 64 tokens of text.
void trace_flux2(const Scope& s, const nlohmann::json& json) {
  const Flux2TransformerConfig c = Flux2TransformerConfig::from_json(json);
  Graph& g = s.graph();
  const Flux2Inputs in{.sample = g.input("sample", {DType::f32, {1, 16, 16, c.in_channels}}),
                       .timestep = g.input("t", {DType::f32, {1}}),
                       .text = g.input("text", {DType::f32, {1, 512, c.joint_attention_dim}})};
  EXPECT_EQ(to_string(flux2_transformer(s, c, in).shape()), "f32[1,16,16,128]");
}

void trace_z_image(const Scope& s, const nlohmann::json& json) {
  const ZImageTransformerConfig c = ZImageTransformerConfig::from_json(json);
  Graph& g = s.graph();
  const ZImageInputs in{.sample = g.input("sample", {DType::f32, {1, 32, 32, c.in_channels}}),
                        .time = g.input("t", {DType::f32, {1}}),
                        .text = g.input("text", {DType::f32, {1, 64, c.cap_feat_dim}}),
                        .lengths = g.input("lengths", {DType::s32, {1}})};
  EXPECT_EQ(to_string(z_image_transformer(s, c, in).shape()), "f32[1,32,32,16]");
}

void trace_qwen_image(const Scope& s, const nlohmann::json& json) {
  const QwenImageTransformerConfig c = QwenImageTransformerConfig::from_json(json);
  Graph& g = s.graph();
  const QwenImageInputs in{.sample = g.input("sample", {DType::f32, {1, 256, c.in_channels}}),
                           .rows = 16,
                           .columns = 16,
                           .timestep = g.input("t", {DType::f32, {1}}),
                           .text = g.input("text", {DType::f32, {1, 64, c.joint_attention_dim}}),
                           .lengths = g.input("lengths", {DType::s32, {1}})};
  EXPECT_EQ(to_string(qwen_image_transformer(s, c, in).shape()), "f32[1,256,64]");
}

template <class Config>
void trace_decoder_64(const Scope& s, const nlohmann::json& json) {
  const auto c = Config::from_json(json);
  decoder_hidden_states(s, c, s.graph().input("ids", {DType::s32, {1, 64}}), {c.num_hidden_layers});
}

/// Lines of the file, with "blocks.{0..29}.x" expanded to blocks.0.x to blocks.29.x.
std::set<std::string> lines_of(const std::string& path) {
  std::istringstream text(read_file(path));
  std::set<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    const size_t open = line.find("{0.."), close = line.find('}');
    if (open == std::string::npos) {
      lines.insert(line);
      continue;
    }
    for (int i = 0; i <= std::stoi(line.substr(open + 4)); ++i)
      lines.insert(line.substr(0, open) + std::to_string(i) + line.substr(close + 1));
  }
  return lines;
}

class FullSize : public testing::TestWithParam<Full> {};

// S2-8
TEST_P(FullSize, HasThePublishedParameters) {
  const Full& f = GetParam();
  Graph g;
  ParamTable table;
  f.trace(Scope(g, table, "model"), parse_json(read_file(golden_path(fmt::format("full/{}.json", f.name)))));
  EXPECT_EQ(table.count(), f.parameters);
  EXPECT_EQ(table.params().size(), f.tensors);
  std::vector<Tensor> all;
  for (const auto& node : g.nodes()) all.push_back(node->out());
  EXPECT_NEAR(count_flops(g, all) / f.flops, 1, 1e-3);
  std::set<std::string> got, want = lines_of(golden_path(fmt::format("full/{}.txt", f.name)));
  for (const Param& p : table.params()) got.insert(fmt::format("{} {}", p.path, fmt::join(p.shape.dims, "x")));
  for (const auto& line : got) EXPECT_TRUE(want.contains(line)) << "not published: " << line;
  for (const auto& line : want) EXPECT_TRUE(got.contains(line)) << "missing: " << line;
}

INSTANTIATE_TEST_SUITE_P(
    Published, FullSize,
    testing::Values(Full{"unet_sdxl", 2567463684, 1680, 145794007040.0, trace_unet},
                    Full{"unet_sd15", 859520964, 686, 45846958080.0, trace_unet},
                    Full{"unet_sd21", 865910724, 686, 46830981120.0, trace_unet},
                    Full{"vae", 83653863, 248, 6958187776.0, trace_vae},
                    Full{"clip_l", 123060480, 196, 13298503680.0, trace_clip},
                    Full{"clip_bigg", 694659840, 517, 97863106560.0, trace_clip},
                    Full{"wan21_t2v_1_3b", 1418996800, 825, 278861709312.0, trace_wan_of_one_time},
                    Full{"wan21_t2v_14b", 14288491584, 1095, 3365816238080.0, trace_wan_of_one_time},
                    Full{"wan21_i2v_14b", 16394878784, 1303, 4458108026880.0, trace_wan_of_one_time},
                    Full{"wan21_flf2v_14b", 16395536704, 1304, 5550360494080.0, trace_wan_of_one_time},
                    Full{"wan22_i2v_a14b", 14288901184, 1095, 3365855559680.0, trace_wan_of_one_time},
                    Full{"clip_vision_h", 630766080, 519, 334587658240.0, trace_vision},
                    Full{"umt5_xxl", 5680910336, 242, 594316099584.0, trace_t5_64},
                    Full{"t5_xxl", 4762310656, 219, 594316099584.0, trace_t5_64},
                    Full{"vae_flux", 83819683, 244, 6960840704.0, trace_vae},
                    Full{"flux_dev", 11901408320, 1160, 10347697668096.0, trace_flux},
                    Full{"flux_schnell", 11891178560, 1156, 10347677220864.0, trace_flux},
                    Full{"flux2_klein_4b", 3875544576, 169, 4917139341312.0, trace_flux2},
                    Full{"flux2_klein_9b", 9078581248, 233, 11082158571520.0, trace_flux2},
                    Full{"z_image", 6154908736, 521, 3674999750656.0, trace_z_image},
                    Full{"qwen_image", 20430401088, 1933, 4439410212864.0, trace_qwen_image},
                    Full{"qwen3_4b", 4022468096, 398, 467480346624.0, trace_decoder_64<Qwen3Config>},
                    Full{"qwen25_vl_7b", 7070619136, 338, 836881088512.0, trace_decoder_64<Qwen25VlConfig>},
                    Full{"wan_vae_21", 126892531, 194, 36452737024.0, trace_wan_vae},
                    Full{"wan_vae_22", 704688668, 196, 58859534336.0, trace_wan_vae},
                    Full{"wan22_ti2v_5b", 4999787712, 825, 1035554783232.0, trace_wan_of_times}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace md
