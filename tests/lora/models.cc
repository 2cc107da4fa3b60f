#include "tests/lora/models.h"

#include <algorithm>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/original_weight_names.h"
#include "maxdiffusion/models/unet2d.h"

namespace md {
namespace {

nlohmann::json recorded() { return parse_json(read_file(golden_path("lora/files.json"))); }

}  // namespace

std::map<std::string, std::string> components_of(const std::string& which) {
  if (which == "sdxl")
    return {{"unet", "unet_sdxl"}, {"text_encoder", "clip_legacy"}, {"text_encoder_2", "clip_projection"}};
  return {{"unet", "unet_sd15"}, {"text_encoder", "clip_legacy"}};
}

LoraNames lora_names_of(const std::string& which) {
  const UNetConfig config = UNetConfig::from_json(load_case(components_of(which).at("unet")).config);
  return {.denoisers = {"unet"}, .others = {{"unet", original_unet_names(config)}}};
}

NamedTensors run_model(const Scope& s, const nlohmann::json& config, NamedTensors& in) {
  if (in.contains("ids")) {
    const ClipTextConfig c = ClipTextConfig::from_json(config);
    const ClipTextOutput y = clip_text(s, c, in.at("ids"));
    NamedTensors out = {{"last", y.last_hidden_state}};
    for (size_t i = 0; i < y.hidden_states.size(); ++i) out[fmt::format("hidden.{}", i)] = y.hidden_states[i];
    out[c.with_projection ? "text_embeds" : "pooled"] = c.with_projection ? y.text_embeds : y.pooled;
    return out;
  }
  UNetInputs inputs{.sample = in.at("sample"),
                    .timestep = in.at("timestep"),
                    .encoder_hidden_states = in.at("encoder_hidden_states"),
                    .text_embeds = in["text_embeds"],
                    .time_ids = in["time_ids"],
                    .mid_residual = in["mid_residual"]};
  for (int i = 0; in.contains(fmt::format("down_residual.{}", i)); ++i)
    inputs.down_residuals.push_back(in[fmt::format("down_residual.{}", i)]);
  return {{"sample", unet2d(s, UNetConfig::from_json(config), inputs)}};
}

TracedModels traced_models(const std::string& which, const ScopeOptions& options) {
  TracedModels m{std::make_unique<Graph>(), {}, {}};
  for (const auto& [component, name] : components_of(which)) {
    const ModelCase c = load_case(name);
    NamedTensors inputs;
    for (const auto& [input, array] : c.inputs) inputs[input] = m.graph->input(component + "." + input, array.shape());
    run_model(Scope(*m.graph, m.params, component, options), c.config, inputs);
    for (const Param& p : m.params.params()) {
      if (p.model != component) continue;
      HostArray all(p.shape);
      const int64_t layers = std::max<int64_t>(p.stacked, 1);
      const size_t bytes = all.bytes() / static_cast<size_t>(layers);
      for (int64_t i = 0; i < layers; ++i) {
        const HostArray one = c.weights.at(p.stacked > 0 ? layer_path(p.path, i) : p.path).cast(p.shape.dtype);
        std::memcpy(all.mutable_data() + static_cast<size_t>(i) * bytes, one.data(), bytes);
      }
      m.values[p.input] = all;
    }
  }
  return m;
}

std::vector<Layout> recorded_layouts() {
  std::vector<Layout> out;
  const nlohmann::json all = recorded();
  for (const char* which : {"sdxl", "sd15"})
    for (const auto& [name, l] : all.at(which).items())
      out.push_back({which, name, l.at("keys"), l.at("metadata"), l.at("adapter_config"), l.at("factors")});
  return out;
}

Layout recorded_layout(const std::string& which, const std::string& name) {
  for (const Layout& l : recorded_layouts())
    if (l.which == which && l.name == name) return l;
  fail(Code::internal, "there is no layout {}/{}", which, name);
}

HostArrays recorded_matrices(const std::string& which) {
  HostArrays out;
  for (const auto& [name, array] : SafetensorsReader::open(golden_path("lora/files.safetensors")).tensors())
    if (name.starts_with(which + "/")) out[name.substr(which.size() + 1)] = array.cast(DType::f32);
  return out;
}

std::string write_layout(const Layout& layout, const std::string& folder, DType dtype) {
  const HostArrays matrices = recorded_matrices(layout.which);
  HostArrays arrays;
  for (const auto& [key, value] : layout.keys.items()) {
    if (value.is_string()) {
      arrays[key] = matrices.at(value.get<std::string>()).cast(dtype);
    } else {
      const float alpha = value.get<float>();
      arrays[key] = HostArray::of<float>({DType::f32, {}}, {&alpha, 1}).cast(dtype);
    }
  }
  std::string path = folder + "/lora.safetensors";
  if (!layout.adapter_config.is_null()) {
    path = folder + "/adapter_model.safetensors";
    write_file_atomic(folder + "/adapter_config.json", layout.adapter_config.dump());
  }
  write_safetensors(path, arrays, layout.metadata.get<std::map<std::string, std::string>>());
  return path;
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

HostArrays LoraOverZeros::changes(const LoraFile& lora) const {
  HostArrays values, out;
  for (const Param& p : params.params()) values[p.input] = zeros_like(HostArray(p.shape));
  merge_loras({{lora, 1}}, params, values);
  for (const auto& [name, array] : values)
    if (std::ranges::any_of(array.to_doubles(), [](double v) { return v != 0; })) out[name] = array;
  return out;
}

void LoraOverZeros::expect_equal(const LoraFile& a, const LoraFile& b) {
  ASSERT_EQ(a.pairs.size(), b.pairs.size());
  for (const auto& [component, pairs] : b.pairs) {
    ASSERT_EQ(a.pairs.at(component).size(), pairs.size());
    for (const auto& [path, pair] : pairs) {
      const LoraPair& other = a.pairs.at(component).at(path);
      EXPECT_EQ(other.down.to_doubles(), pair.down.to_doubles()) << path;
      EXPECT_EQ(other.up.to_doubles(), pair.up.to_doubles()) << path;
      EXPECT_EQ(other.alpha, pair.alpha) << path;
    }
  }
}

}  // namespace md
