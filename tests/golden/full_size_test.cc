// The published models by tracing alone: parameter names, shapes and counts, and the work of one call.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <set>
#include <sstream>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/models/wan_vae.h"
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
  EXPECT_EQ(to_string(p.mean.shape()), "f32[1,4,2,4]");
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

std::set<std::string> lines_of(const std::string& path) {
  std::istringstream text(read_file(path));
  std::set<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.insert(line);
  return lines;
}

class FullSize : public testing::TestWithParam<Full> {};

TEST_P(FullSize, HasThePublishedParameters) {
  const Full& f = GetParam();
  Graph g;
  ParamTable table;
  f.trace(Scope(g, table, "model"), nlohmann::json::parse(read_file(golden_path(fmt::format("full/{}.json", f.name)))));
  EXPECT_EQ(table.count(), f.parameters);
  EXPECT_EQ(table.params().size(), f.tensors);
  EXPECT_NEAR(count_flops(g) / f.flops, 1, 1e-3);
  std::set<std::string> got, want = lines_of(golden_path(fmt::format("full/{}.txt", f.name)));
  for (const Param& p : table.params()) got.insert(fmt::format("{} {}", p.path, fmt::join(p.shape.dims, "x")));
  for (const auto& line : got) EXPECT_TRUE(want.contains(line)) << "not published: " << line;
  for (const auto& line : want) EXPECT_TRUE(got.contains(line)) << "missing: " << line;
}

INSTANTIATE_TEST_SUITE_P(Published, FullSize,
                         testing::Values(Full{"unet_sdxl", 2567463684, 1680, 145794007040.0, trace_unet},
                                         Full{"unet_sd15", 859520964, 686, 45846958080.0, trace_unet},
                                         Full{"unet_sd21", 865910724, 686, 46830981120.0, trace_unet},
                                         Full{"vae", 83653863, 248, 6958187776.0, trace_vae},
                                         Full{"wan_vae_21", 126892531, 194, 36452737024.0, trace_wan_vae},
                                         Full{"wan_vae_22", 704688668, 196, 58859534336.0, trace_wan_vae},
                                         Full{"clip_l", 123060480, 196, 13298503680.0, trace_clip},
                                         Full{"clip_bigg", 694659840, 517, 97863106560.0, trace_clip}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace md
