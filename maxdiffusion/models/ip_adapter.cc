#include "maxdiffusion/models/ip_adapter.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr int64_t kHead = 64;  // features of a head of the resampler
constexpr double kEps = 1e-5;

Tensor linear(const Scope& s, Tensor x, int64_t out, bool bias = false) {
  return nn::linear(s, x, {.out = out, .bias = bias});
}

/// One block of the resampler: latents attend to the image's tokens and to themselves.
Tensor resample(const Scope& s, const IpAdapterConfig& c, Tensor image, Tensor latents) {
  const Scope attention = s / 0, ff = s / 1;
  Tensor x = nn::layer_norm(attention / "norm1", image, kEps), l = nn::layer_norm(attention / "norm2", latents, kEps);
  auto heads = [&](Tensor y) { return reshape(y, {y.dim(0), y.dim(1), c.inner / kHead, kHead}); };
  const Tensor q = heads(linear(attention / "to_q", l, c.inner));
  const std::vector<Tensor> kv = split(linear(attention / "to_kv", concatenate({x, l}, 1), 2 * c.inner), 2, 2);
  Tensor y = nn::cross_attend(q, heads(kv[0]), heads(kv[1]),
                              {.kernel = s.options().attention, .precision = s.options().precision});
  latents = latents + linear(attention / "to_out", reshape(y, {l.dim(0), l.dim(1), c.inner}), c.hidden);
  Tensor h = linear(ff / 1, nn::layer_norm(ff / 0, latents, kEps), c.feed_forward);
  return latents + linear(ff / 3, nn::activation("gelu", h), c.hidden);
}

}  // namespace

IpAdapterConfig IpAdapterConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "IP-Adapter config");
  IpAdapterConfig c;
  c.plus = r.get("plus", c.plus);
  c.embed = r.get("embed", c.embed);
  c.tokens = r.get("tokens", c.tokens);
  c.width = r.get("width", c.width);
  c.hidden = r.get("hidden", c.hidden);
  c.inner = r.get("inner", c.inner);
  c.feed_forward = r.get("feed_forward", c.feed_forward);
  c.depth = r.get("depth", c.depth);
  c.layers = r.get("layers", c.layers);
  return c;
}

std::string ip_adapter_config(const HostArrays& tensors, const std::string& file) {
  auto dims = [&](const std::string& name, size_t rank) {
    const auto found = tensors.find(name);
    check(found != tensors.end() && found->second.shape().rank() == static_cast<int64_t>(rank), Code::io,
          "ip_adapter: '{}' has no tensor {} of {} axes; expected a file of an IP-Adapter, plain or plus (those of "
          "faces' identities and `full` are not supported)",
          file, name, rank);
    return found->second.dims();
  };
  nlohmann::json c = {{"_class_name", "IPAdapter"}};
  const bool plus = tensors.contains("image_proj.latents");
  c["plus"] = plus;
  std::vector<int64_t> layers;
  for (int64_t i = 1; tensors.contains(fmt::format("ip_adapter.{}.to_k_ip.weight", i)); i += 2)
    layers.push_back(dims(fmt::format("ip_adapter.{}.to_k_ip.weight", i), 2)[0]);
  const Dims first = dims("ip_adapter.1.to_k_ip.weight", 2);
  c["width"] = first[1], c["layers"] = layers;
  if (!plus) {
    const Dims proj = dims("image_proj.proj.weight", 2);
    c["embed"] = proj[1], c["tokens"] = proj[0] / first[1];
    return c.dump(2) + "\n";
  }
  const Dims latents = dims("image_proj.latents", 3);
  int64_t depth = 0;
  while (tensors.contains(fmt::format("image_proj.layers.{}.0.to_q.weight", depth))) ++depth;
  c["depth"] = depth, c["tokens"] = latents[1], c["hidden"] = latents[2];
  c["embed"] = dims("image_proj.proj_in.weight", 2)[1];
  c["inner"] = dims("image_proj.layers.0.0.to_q.weight", 2)[0];
  c["feed_forward"] = dims("image_proj.layers.0.1.1.weight", 2)[0];
  return c.dump(2) + "\n";
}

Tensor ip_adapter_tokens(const Scope& root, const IpAdapterConfig& c, Tensor image) {
  auto path = root.path_scope();
  const Scope s = root / "image_proj";
  image = cast(image, s.dtype());
  if (!c.plus)
    return nn::layer_norm(
        s / "norm", reshape(linear(s / "proj", image, c.tokens * c.width, true), {image.dim(0), c.tokens, c.width}),
        kEps);
  Tensor latents = cast(s.param("latents", {1, c.tokens, c.hidden}, {"", "", ""}, init::normal(0.02)), s.dtype());
  latents = broadcast_to(latents, {image.dim(0), c.tokens, c.hidden});
  image = linear(s / "proj_in", image, c.hidden, true);
  for (int64_t i = 0; i < c.depth; ++i) latents = resample(s / "layers" / i, c, image, latents);
  return nn::layer_norm(s / "norm_out", linear(s / "proj_out", latents, c.width, true), kEps);
}

Tensor ip_adapter_attention(const Scope& root, const IpAdapterConfig& c, size_t layer, Tensor q, Tensor tokens) {
  auto path = root.path_scope();
  const Scope s = root / "ip_adapter" / static_cast<int64_t>(2 * layer + 1);
  tokens = cast(tokens, s.dtype());
  auto heads = [&](const char* name) {
    Tensor y = linear(s / name, tokens, c.layers.at(layer));
    return cast(reshape(y, {y.dim(0), y.dim(1), q.dim(2), q.dim(3)}), q.dtype());
  };
  return nn::cross_attend(q, heads("to_k_ip"), heads("to_v_ip"),
                          {.kernel = s.options().attention, .precision = s.options().precision});
}

void trace_ip_adapter(const Scope& s, const IpAdapterConfig& c) {
  Graph& g = s.graph();
  const Tensor tokens =
      ip_adapter_tokens(s, c, full(g, 0, {DType::f32, c.plus ? Dims{1, 1, c.embed} : Dims{1, c.embed}}));
  for (size_t i = 0; i < c.layers.size(); ++i)
    ip_adapter_attention(s, c, i, full(g, 0, {DType::f32, {1, 1, 1, c.layers[i]}}), tokens);
}

}  // namespace md
