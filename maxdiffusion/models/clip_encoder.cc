#include "maxdiffusion/models/clip_encoder.h"

#include <cmath>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Standard deviations of initial values. As in CLIP, those of residual branches shrink with depth. Values and output
/// of attention are larger, because random_text_encoder uses initial values untrained, and the end token, which is
/// equal in all captions, receives the text only through attention.
struct Inits {
  Inits(double width, double depth)
      : into(init::normal(std::pow(width, -0.5) * std::pow(2 * depth, -0.5))),
        value(init::normal(std::pow(width, -0.5))),
        mixed(init::normal(2 * std::pow(width, -0.5))),
        fc1(init::normal(std::pow(2 * width, -0.5))) {}
  Init into, value, mixed, fc1;  // q, k and fc2; v; out_proj; fc1
};

Tensor self_attention(const Scope& s, Tensor x, const ClipEncoderOptions& o, const Inits& inits) {
  auto path = s.path_scope();
  const int64_t width = x.dim(-1);
  auto project = [&](const char* layer, Init init, const char* name) {
    Tensor y = named(nn::linear(s / layer, x, {.out = width, .init = init}), name);
    return reshape(y, {x.dim(0), x.dim(1), o.heads, width / o.heads});
  };
  Tensor q = project("q_proj", inits.into, value::kQueryProj), k = project("k_proj", inits.into, value::kKeyProj),
         v = project("v_proj", inits.value, value::kValueProj);
  Tensor y = nn::self_attend(q, k, v,
                             {.kernel = s.options().attention, .causal = o.causal, .precision = s.options().precision});
  return nn::linear(s / "out_proj", reshape(y, x.dims()), {.out = width, .init = inits.mixed});
}

Tensor layer(const Scope& s, Tensor x, const ClipEncoderOptions& o, const Inits& inits) {
  auto path = s.path_scope();
  x = x + self_attention(s / "self_attn", nn::layer_norm(s / "layer_norm1", x, o.eps), o, inits);
  Tensor h = nn::layer_norm(s / "layer_norm2", x, o.eps);
  h = nn::activation(o.activation, nn::linear(s / "mlp.fc1", h, {.out = o.intermediate, .init = inits.fc1}));
  h = named(h, value::kFfnActivation);
  return x + nn::linear(s / "mlp.fc2", h, {.out = x.dim(-1), .init = inits.into});
}

}  // namespace

std::vector<Tensor> clip_encoder(const Scope& s, Tensor x, const ClipEncoderOptions& o) {
  const Inits inits(static_cast<double>(x.dim(-1)), static_cast<double>(o.layers));
  std::vector<Tensor> states = {x};
  for (int64_t i = 0; i < o.layers; ++i) {
    const Scope block = s / "layers" / i;
    x = nn::remat(
        block, [&](Tensor h) { return layer(block, h, o, inits); }, x);
    states.push_back(x);
  }
  return states;
}

}  // namespace md
