#include "maxdiffusion/models/decoder_transformer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/rotary.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

using Config = DecoderConfig;

Tensor linear(const Scope& s, Tensor x, int64_t out, bool bias, const std::string& in_axis,
              const std::string& out_axis) {
  return nn::linear(s, x, {.out = out, .bias = bias, .in_axis = in_axis, .out_axis = out_axis});
}

/// Positions of tokens, and lengths of the texts.
struct Places {
  nn::Rotary rotary;
  Tensor lengths;  // s32 [B]; absent: no padding
};

Tensor self_attention(const Scope& s, Tensor x, const Config& c, const Places& places) {
  auto path = s.path_scope();
  auto constrain = [](Tensor t) { return shard(t, {axis::kBatch, axis::kLength, axis::kHeadsAct}); };
  auto project = [&](const char* layer, int64_t heads, const char* name) {
    Tensor y = linear(s / layer, x, heads * c.head_dim, c.qkv_bias, axis::kEmbed, axis::kHeads);
    return reshape(named(constrain(y), name), {x.dim(0), x.dim(1), heads, c.head_dim});
  };
  auto turned = [&](const char* norm, Tensor y) {
    return nn::rotated(c.qk_norm ? nn::rms_norm(s / norm, y, c.rms_norm_eps) : y, places.rotary,
                       nn::RotaryPairs::halves);
  };
  Tensor q = turned("q_norm", project("q_proj", c.num_attention_heads, value::kQueryProj)),
         k = turned("k_norm", project("k_proj", c.num_key_value_heads, value::kKeyProj)),
         v = project("v_proj", c.num_key_value_heads, value::kValueProj);
  AttentionOptions options = nn::attention_options(s, {.batch = axis::kBatch,
                                                       .length = axis::kLength,
                                                       .kv_length = axis::kKvLength,
                                                       .heads = axis::kHeadsAct,
                                                       .head_dim = axis::kKv});
  options.causal = true;
  options.lengths = places.lengths;
  Tensor y = nn::self_attend(q, k, v, options);
  return linear(s / "o_proj", constrain(reshape(y, {x.dim(0), x.dim(1), c.num_attention_heads * c.head_dim})),
                c.hidden_size, c.out_bias, axis::kHeads, axis::kEmbed);
}

/// down(act(gate·x) · up·x).
Tensor feed_forward(const Scope& s, Tensor x, const Config& c) {
  auto path = s.path_scope();
  auto into = [&](const char* name) {
    return linear(s / name, x, c.intermediate_size, false, axis::kEmbed, axis::kMlp);
  };
  Tensor h = named(nn::activation(c.hidden_act, into("gate_proj")) * into("up_proj"), value::kFfnActivation);
  return linear(s / "down_proj", h, c.hidden_size, false, axis::kMlp, axis::kEmbed);
}

Tensor layer(const Scope& s, Tensor x, const Config& c, const Places& places) {
  auto path = s.path_scope();
  x = x + self_attention(s / "self_attn", nn::rms_norm(s / "input_layernorm", x, c.rms_norm_eps), c, places);
  return x + feed_forward(s / "mlp", nn::rms_norm(s / "post_attention_layernorm", x, c.rms_norm_eps), c);
}

void check_ids(const Config& c, Tensor ids, const std::vector<int64_t>& layers) {
  check(ids.rank() == 2 && is_integer(ids.dtype()), Code::invalid_graph,
        "decoder: ids are {}; expected integers [B, L]", to_string(ids.shape()));
  for (int64_t i : layers)
    check(i >= 0 && i <= c.num_hidden_layers, Code::invalid_graph, "decoder: hidden state {}; expected 0 to {}", i,
          c.num_hidden_layers);
}

/// Hidden states of `layers`, from embedded tokens x.
std::vector<Tensor> states_of(const Scope& s, const Config& c, Tensor x, const Places& places,
                              const std::vector<int64_t>& layers) {
  std::vector<Tensor> states = {x};
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const Scope block = s / "layers" / i;
    x = nn::remat(
        block, [&](Tensor h) { return layer(block, h, c, places); }, x);
    states.push_back(x);
  }
  states.back() = nn::rms_norm(s / "norm", x, c.rms_norm_eps);
  std::vector<Tensor> out;
  for (int64_t i : layers) out.push_back(states.at(static_cast<size_t>(i)));
  return out;
}

/// Rotary positions of tokens at times, rows and columns, for the sections of a head's pairs.
nn::Rotary rotary_of(Graph& g, const Qwen25VlConfig& c, const std::vector<std::array<int64_t, 3>>& places) {
  const int64_t half = c.head_dim / 2;
  const Shape shape{DType::f32, {1, std::ssize(places), 1, half}};
  HostArray cosines(shape), sines(shape);
  auto cosine = cosines.mutable_view<float>().begin(), sine = sines.mutable_view<float>().begin();
  for (const std::array<int64_t, 3>& place : places) {
    int64_t pair = 0;
    for (size_t section = 0; section < c.mrope_section.size(); ++section)
      for (int64_t i = 0; i < c.mrope_section[section]; ++i, ++pair) {
        const double exponent = static_cast<double>(2 * pair) / static_cast<double>(c.head_dim),
                     angle = static_cast<double>(place.at(section % 3)) / std::pow(c.rope_theta, exponent);
        *cosine++ = static_cast<float>(std::cos(angle)), *sine++ = static_cast<float>(std::sin(angle));
      }
  }
  return {constant(g, cosines), constant(g, sines)};
}

/// Reads `rope_theta` and `rope_scaling`, or since transformers 5 `rope_parameters` with both. `read_rest`: reads their
/// other members.
template <class F>
void read_rotary(ConfigReader& r, const nlohmann::json& config, Config& c, std::initializer_list<PlainValue> types,
                 F read_rest) {
  r.ignore({"rope_parameters", "rope_scaling"});
  c.rope_theta = r.get("rope_theta", c.rope_theta);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_object()) continue;
    ConfigReader p(*found, r.what() + ": " + key);
    c.rope_theta = p.get("rope_theta", c.rope_theta);
    for (const char* type : {"rope_type", "type"}) p.neutral(type, types);
    read_rest(p);
    p.finish();
  }
}

void read_sizes(ConfigReader& r, Config& c) {
  r.neutral("use_sliding_window", {false});
  c.vocab_size = r.get("vocab_size", c.vocab_size);
  c.hidden_size = r.get("hidden_size", c.hidden_size);
  c.intermediate_size = r.get("intermediate_size", c.intermediate_size);
  c.num_hidden_layers = r.get("num_hidden_layers", c.num_hidden_layers);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.num_key_value_heads = r.get("num_key_value_heads", c.num_attention_heads);
  c.rms_norm_eps = r.get("rms_norm_eps", c.rms_norm_eps);
  c.hidden_act = r.get("hidden_act", c.hidden_act);
  for (const std::string& type : r.get("layer_types", std::vector<std::string>{}))
    check(type == "full_attention", Code::invalid_config, "{}: 'layer_types' holds '{}', expected 'full_attention'",
          r.what(), type);
  r.positive({{"vocab_size", c.vocab_size},
              {"hidden_size", c.hidden_size},
              {"intermediate_size", c.intermediate_size},
              {"num_hidden_layers", c.num_hidden_layers},
              {"num_attention_heads", c.num_attention_heads},
              {"num_key_value_heads", c.num_key_value_heads}});
  check(c.num_attention_heads % c.num_key_value_heads == 0, Code::invalid_config,
        "{}: 'num_attention_heads' is {}, expected a multiple of 'num_key_value_heads' = {}", r.what(),
        c.num_attention_heads, c.num_key_value_heads);
}

}  // namespace

std::string qwen3_chat(const std::string& prompt, bool thinks) {
  return "<|im_start|>user\n" + prompt + "<|im_end|>\n<|im_start|>assistant\n" +
         (thinks ? "" : "<think>\n\n</think>\n\n");
}

Qwen3Config Qwen3Config::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "Qwen3 config");
  Qwen3Config c;
  read_sizes(r, c);
  c.head_dim = r.get("head_dim", c.head_dim);
  c.qkv_bias = c.out_bias = r.get("attention_bias", false);
  read_rotary(r, config, c, {"default"}, [](ConfigReader&) {});
  check(c.head_dim > 0 && c.head_dim % 2 == 0, Code::invalid_config,
        "{}: 'head_dim' is {}, expected an even number above 0", r.what(), c.head_dim);
  return c;
}

Qwen25VlConfig Qwen25VlConfig::from_json(const nlohmann::json& whole) {
  const std::string name = "Qwen2.5-VL config";
  const auto text = whole.find("text_config");
  const bool nested = text != whole.end() && !text->is_null();
  const nlohmann::json& config = nested ? *text : whole;
  ConfigReader r(config, nested ? name + ": text_config" : name);
  Qwen25VlConfig c;
  c.vocab_size = 152064, c.hidden_size = 8192, c.intermediate_size = 29568, c.num_hidden_layers = 80;
  c.num_attention_heads = 64, c.rms_norm_eps = 1e-5, c.rope_theta = 1e6;
  c.qkv_bias = true, c.qk_norm = false;
  read_sizes(r, c);
  check(c.hidden_size % (2 * c.num_attention_heads) == 0, Code::invalid_config,
        "{}: 'hidden_size' is {}, expected an even multiple of 'num_attention_heads' = {}", r.what(), c.hidden_size,
        c.num_attention_heads);
  c.head_dim = c.hidden_size / c.num_attention_heads;
  c.mrope_section = {c.head_dim / 2};
  read_rotary(r, config, c, {"default", "mrope"}, [&](ConfigReader& p) {
    // Numbers of feature pairs for time, row and column; these are equal for text.
    c.mrope_section = p.get("mrope_section", c.mrope_section);
    const int64_t pairs = std::accumulate(c.mrope_section.begin(), c.mrope_section.end(), int64_t{0});
    check(2 * pairs == c.head_dim, Code::invalid_config,
          "{}: the sum of 'mrope_section' is {}, expected {}, half of 'hidden_size' / 'num_attention_heads'", p.what(),
          pairs, c.head_dim / 2);
  });
  if (const auto vision = whole.find("vision_config"); vision != whole.end() && vision->is_object())
    c.vision = QwenVisionConfig::from_json(*vision);
  return c;
}

std::vector<Tensor> decoder_hidden_states(const Scope& s, const Config& c, Tensor ids,
                                          const std::vector<int64_t>& layers, Tensor lengths) {
  auto path = s.path_scope();
  check_ids(c, ids, layers);
  Tensor x = nn::embedding(s / "embed_tokens", ids, c.vocab_size, c.hidden_size);
  return states_of(s, c, x, {nn::grid_rotary(s.graph(), {ids.dim(1)}, {c.head_dim}, c.rope_theta), lengths}, layers);
}

Tensor image_in_text(const Scope& s, const Qwen25VlConfig& c, Tensor pixels) {
  check(c.vision.has_value(), Code::invalid_config, "Qwen2.5-VL config: no 'vision_config'; expected one, for images");
  check(c.vision->out_hidden_size == c.hidden_size, Code::invalid_config,
        "Qwen2.5-VL config: 'vision_config' has 'out_hidden_size' {}, expected 'hidden_size' = {}",
        c.vision->out_hidden_size, c.hidden_size);
  const int64_t unit = c.vision->token_size();
  return reshape(qwen_vision(s / "visual", *c.vision, pixels),
                 {pixels.dim(0), pixels.dim(1) / unit, pixels.dim(2) / unit, c.hidden_size});
}

std::vector<Tensor> decoder_hidden_states(const Scope& s, const Qwen25VlConfig& c, Tensor ids,
                                          const std::vector<int64_t>& layers, const std::vector<ImageInText>& images) {
  if (images.empty()) return decoder_hidden_states(s, c, ids, layers);
  auto path = s.path_scope();
  check_ids(c, ids, layers);
  Tensor x = nn::embedding(s / "embed_tokens", ids, c.vocab_size, c.hidden_size);
  std::vector<Tensor> parts;
  std::vector<std::array<int64_t, 3>> places;
  int64_t next = 0, at = 0;  // token, and position
  const auto text_to = [&](int64_t end) {
    parts.push_back(slice_axis(x, 1, next, end));
    for (; next < end; ++next, ++at) places.push_back({at, at, at});
  };
  for (const ImageInText& image : images) {
    check(image.first >= next, Code::invalid_graph, "decoder: an image begins at token {}; expected {} or more",
          image.first, next);
    text_to(image.first);
    const int64_t rows = image.features.dim(1), columns = image.features.dim(2);
    parts.push_back(cast(reshape(image.features, {x.dim(0), rows * columns, c.hidden_size}), x.dtype()));
    for (int64_t i = 0; i < rows * columns; ++i) places.push_back({at, at + i / columns, at + i % columns});
    next += rows * columns, at += std::max(rows, columns);
  }
  check(next < ids.dim(1), Code::invalid_graph, "decoder: {} tokens; expected more than the {} up to the last image",
        ids.dim(1), next);
  text_to(ids.dim(1));
  return states_of(s, c, concatenate(parts, 1), {rotary_of(s.graph(), c, places), {}}, layers);
}

void trace_decoder(const Scope& s, const Config& c) {
  decoder_hidden_states(s, c, full(s.graph(), 0, {DType::s32, {1, 1}}), {c.num_hidden_layers});
}

namespace {

/// "layers.3.self_attn.q_proj.weight" → "blk.3.attn_q.weight".
std::string llama_name(std::string name) {
  static const std::vector<std::pair<std::string, std::string>> rows = {
      {"embed_tokens.", "token_embd."},        {"layers.", "blk."},
      {".input_layernorm.", ".attn_norm."},    {".post_attention_layernorm.", ".ffn_norm."},
      {".self_attn.q_norm.", ".attn_q_norm."}, {".self_attn.k_norm.", ".attn_k_norm."},
      {".self_attn.q_proj.", ".attn_q."},      {".self_attn.k_proj.", ".attn_k."},
      {".self_attn.v_proj.", ".attn_v."},      {".self_attn.o_proj.", ".attn_output."},
      {".mlp.gate_proj.", ".ffn_gate."},       {".mlp.up_proj.", ".ffn_up."},
      {".mlp.down_proj.", ".ffn_down."}};
  if (name.starts_with("norm.")) return "output_" + name;
  for (const auto& [ours, theirs] : rows)
    if (const size_t at = name.find(ours); at != std::string::npos) name.replace(at, ours.size(), theirs);
  return name;
}

}  // namespace

WeightNameMap causal_decoder_names(const DecoderConfig& c) {
  const std::string prefixes[] = {of_text_encoder("qwen3_4b"), of_text_encoder("qwen3_8b"),
                                  of_text_encoder("qwen25_7b")};
  std::vector<std::string> unneeded = {"lm_head.", "visual.", "model.visual.", "output.", "rope_freqs."};
  for (const std::string& prefix : prefixes)
    for (const char* name : {"lm_head.", "visual.", "model.visual."}) unneeded.push_back(prefix + name);
  return {.aliases =
              [prefixes = std::to_array(prefixes)](const std::string& name) {
                std::vector<WeightAlias> names;
                for (const std::string& prefix : prefixes)
                  for (const char* before : {"model.", ""}) names.push_back({.prefix = prefix, .name = before + name});
                if (name.starts_with("visual.")) {
                  names.insert(names.begin(), {.name = "model." + name});
                  return names;
                }
                for (const char* before : {"model.", "model.language_model.", "language_model."})
                  names.push_back({.name = before + name});
                names.push_back({.name = llama_name(name)});
                return names;
              },
          .unneeded = std::move(unneeded),
          .architecture = c.qk_norm ? "qwen3" : "qwen2vl",
          .gguf_name = llama_name};
}

}  // namespace md
