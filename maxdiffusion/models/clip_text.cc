#include "maxdiffusion/models/clip_text.h"

#include <cmath>

#include "maxdiffusion/models/clip_encoder.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Row of x at the end token. The legacy id 2 in a config means the position of the vocabulary's largest id; otherwise
/// the first eos_token_id.
Tensor at_end_of_text(const ClipTextConfig& c, Tensor x, Tensor ids) {
  if (c.added_tokens > 0) {  // their ids are larger
    const Tensor size = full(ids.graph(), static_cast<double>(c.vocab_size), ids.shape());
    ids = where(lt(ids, size), ids, full(ids.graph(), 0, ids.shape()));
  }
  Tensor key = c.eos_token_id == 2
                   ? ids
                   : cast(eq(ids, constant(ids.graph(), static_cast<double>(c.eos_token_id), ids.dtype())), DType::s32);
  return take_per_batch(x, argmax(key, 1));
}

}  // namespace

ClipTextConfig ClipTextConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "CLIPTextModel config");
  ClipTextConfig c;
  r.neutral("model_type", {"clip_text_model"});
  c.vocab_size = r.get("vocab_size", c.vocab_size);
  c.hidden_size = r.get("hidden_size", c.hidden_size);
  c.intermediate_size = r.get("intermediate_size", c.intermediate_size);
  c.num_hidden_layers = r.get("num_hidden_layers", c.num_hidden_layers);
  c.num_attention_heads = r.get("num_attention_heads", c.num_attention_heads);
  c.max_position_embeddings = r.get("max_position_embeddings", c.max_position_embeddings);
  c.projection_dim = r.get("projection_dim", c.projection_dim);
  c.eos_token_id = r.get("eos_token_id", c.eos_token_id);
  c.hidden_act = r.get("hidden_act", c.hidden_act);
  c.layer_norm_eps = r.get("layer_norm_eps", c.layer_norm_eps);
  for (const auto& name : r.get<std::vector<std::string>>("architectures", {"CLIPTextModel"})) {
    check(name == "CLIPTextModel" || name == "CLIPTextModelWithProjection", Code::invalid_config,
          "{}: 'architectures' holds '{}', which is not one of: CLIPTextModel, CLIPTextModelWithProjection", r.what(),
          name);
    c.with_projection = name == "CLIPTextModelWithProjection";
  }
  // transformers writes many fields that do not affect the model, so unknown fields are not rejected.
  check(c.num_attention_heads > 0 && c.hidden_size % c.num_attention_heads == 0, Code::invalid_config,
        "{}: 'hidden_size' {} does not divide into 'num_attention_heads' {}", r.what(), c.hidden_size,
        c.num_attention_heads);
  return c;
}

ClipTextOutput clip_text(const Scope& root, const ClipTextConfig& c, Tensor ids, int64_t skip) {
  auto path = root.path_scope();
  check(ids.rank() == 2 && is_integer(ids.dtype()) && ids.dim(1) <= c.max_position_embeddings, Code::invalid_graph,
        "clip_text: ids are {}, expected integers [B, L] with L up to {}", to_string(ids.shape()),
        c.max_position_embeddings);
  const Scope s = root / "text_model";
  // Larger than CLIP's 0.02: random_text_encoder uses initial values untrained, and embeddings of tokens would be
  // negligible.
  const Init token = init::normal(1);
  Tensor x = nn::embedding(s / "embeddings.token_embedding", ids, c.vocab_size, c.hidden_size, token, c.added_tokens);
  Tensor positions = (s / "embeddings.position_embedding")
                         .param("weight", {c.max_position_embeddings, c.hidden_size}, {"", ""}, init::normal(0.01));
  x = x + cast(slice_axis(positions, 0, 0, ids.dim(1)), x.dtype());

  ClipTextOutput y;
  y.hidden_states = clip_encoder(s / "encoder", x,
                                 {.layers = c.num_hidden_layers,
                                  .heads = c.num_attention_heads,
                                  .intermediate = c.intermediate_size,
                                  .activation = c.hidden_act,
                                  .eps = c.layer_norm_eps,
                                  .causal = true});
  x = y.hidden_states.back();
  check(skip >= 0 && skip <= c.num_hidden_layers, Code::invalid_config,
        "clip_skip is {}; expected 0 to {}, the layers of the text encoder", skip, c.num_hidden_layers);
  if (skip > 0) x = concatenate({x, y.hidden_states[y.hidden_states.size() - 1 - static_cast<size_t>(skip)]}, 0);
  x = nn::layer_norm(s / "final_layer_norm", x, c.layer_norm_eps);
  const std::vector<Tensor> normed = split(x, skip > 0 ? 2 : 1, 0);
  y.last_hidden_state = normed.front();
  if (skip > 0) y.skipped = normed.back();
  y.pooled = at_end_of_text(c, y.last_hidden_state, ids);
  if (c.with_projection) {
    const Init out = init::normal(std::pow(static_cast<double>(c.hidden_size), -0.5));
    y.text_embeds =
        nn::linear(root / "text_projection", y.pooled, {.out = c.projection_dim, .bias = false, .init = out});
  }
  return y;
}

void trace_clip_text(const Scope& s, const ClipTextConfig& c) {
  clip_text(s, c, full(s.graph(), 0, {DType::s32, {1, 1}}));
}

}  // namespace md
