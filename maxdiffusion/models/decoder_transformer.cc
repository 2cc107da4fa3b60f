#include "maxdiffusion/models/decoder_transformer.h"

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

/// Where tokens are, and which of a text are no padding.
struct Places {
  nn::Rotary rotary;
  Tensor lengths;  // s32 [B]; absent: all
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
  AttentionOptions how = nn::attention_options(s, {.batch = axis::kBatch,
                                                   .length = axis::kLength,
                                                   .kv_length = axis::kKvLength,
                                                   .heads = axis::kHeadsAct,
                                                   .head_dim = axis::kKv});
  how.causal = true;
  how.lengths = places.lengths;
  Tensor y = nn::self_attend(q, k, v, how);
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

/// `rope_theta` and `rope_scaling`, or since transformers 5 `rope_parameters` with both. `read_rest`: the other
/// members.
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
  read_rotary(r, config, c, {"default", "mrope"}, [&](ConfigReader& p) {
    // Pairs of features that turn with the time, the row and the column, which are one number for text.
    const auto sections = p.get("mrope_section", std::vector<int64_t>{c.head_dim / 2});
    const int64_t pairs = std::accumulate(sections.begin(), sections.end(), int64_t{0});
    check(2 * pairs == c.head_dim, Code::invalid_config,
          "{}: the sum of 'mrope_section' is {}, expected {}, half of 'hidden_size' / 'num_attention_heads'", p.what(),
          pairs, c.head_dim / 2);
  });
  return c;
}

std::vector<Tensor> decoder_hidden_states(const Scope& s, const Config& c, Tensor ids,
                                          const std::vector<int64_t>& layers, Tensor lengths) {
  auto path = s.path_scope();
  check(ids.rank() == 2 && is_integer(ids.dtype()), Code::invalid_graph,
        "decoder: ids are {}; expected integers [B, L]", to_string(ids.shape()));
  for (int64_t i : layers)
    check(i >= 0 && i <= c.num_hidden_layers, Code::invalid_graph, "decoder: hidden state {}; expected 0 to {}", i,
          c.num_hidden_layers);
  const Places places{nn::grid_rotary(s.graph(), {ids.dim(1)}, {c.head_dim}, c.rope_theta), lengths};
  Tensor x = nn::embedding(s / "embed_tokens", ids, c.vocab_size, c.hidden_size);
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

void trace_decoder(const Scope& s, const Config& c) {
  decoder_hidden_states(s, c, full(s.graph(), 0, {DType::s32, {1, 1}}), {c.num_hidden_layers});
}

WeightNameMap causal_decoder_names(const DecoderConfig&) {
  return {.of =
              [](const std::string& name) {
                std::vector<WeightAlias> names;
                for (const char* before : {"model.", "model.language_model.", "language_model."})
                  names.push_back({.name = before + name});
                return names;
              },
          .unneeded = {"lm_head.", "visual.", "model.visual."}};
}

}  // namespace md
