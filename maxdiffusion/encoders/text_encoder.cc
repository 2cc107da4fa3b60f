#include "maxdiffusion/encoders/text_encoder.h"

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/mesh/logical_axes.h"

namespace md {

TextEncoder::TextEncoder(const Devices& devices, std::shared_ptr<const Family> family, int64_t batch,
                         const WeightsOf& weights, const ScopeOptions& scope, const CompileConfig& compile,
                         int64_t clip_skip, const EncoderKeys& keys)
    : devices_(devices),
      family_(std::move(family)),
      batch_(batch),
      clip_skip_(clip_skip),
      scope_(text_encoder_options(scope, keys)),
      compile_(compile) {
  Graph g(devices.graph_options(&devices.rules()));
  ParamTable params;
  build(g, params, clip_skip);
  const auto& program = programs_.emplace(clip_skip, md::compile(devices, g, compile_, "text_encoder")).first->second;
  for (const std::string& component : family_->spec().text_components()) {
    const HostArrays values = weights(params, component);
    place(devices, program, values, arrays_);
    weights_[component] = as_arrays(published(params, component, as_pieces(values)));
  }
}

void TextEncoder::build(Graph& g, ParamTable& params, int64_t clip_skip) const {
  Conditioning text;
  for (const Field& f : family_->spec().text_fields()) {
    const Shape shape = batched(batch_, f.shape);
    text[f.name] = g.input(f.name, shape, axis::of_batch(shape.dims.size()));
  }
  const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
  for (const auto& [name, tensor] : family_->encode_text(models, text, clip_skip)) g.output(name, tensor);
}

const Program& TextEncoder::program(int64_t clip_skip) {
  if (const auto p = programs_.find(clip_skip); p != programs_.end()) return p->second;
  Graph g(devices_.graph_options(&devices_.rules()));
  ParamTable params;
  build(g, params, clip_skip);
  return programs_.emplace(clip_skip, md::compile(devices_, g, compile_, "text_encoder")).first->second;
}

HostArrays TextEncoder::encode(const std::vector<std::string>& captions, bool all_layers,
                               const std::vector<std::string>& seconds) {
  const Program& encoder = program(all_layers ? 0 : clip_skip_);
  HostArrays text = family_->tokenize(captions);
  if (!seconds.empty()) {
    HostArrays others = family_->tokenize(seconds);
    for (const std::string& name : family_->spec().second_text_fields()) text.at(name) = others.at(name);
  }
  const int64_t n = static_cast<int64_t>(captions.size());
  HostArrays out;
  for (int64_t from = 0; from < n; from += batch_) {
    HostArrays in;
    for (const auto& [name, ids] : text) in[name] = rows(ids, from, batch_);
    ArrayMap feed;
    place(devices_, encoder, in, feed);
    for (const auto& [name, array] : encoder.run(feed, arrays_)) add_rows(out[name], n, from, devices_.get(array));
  }
  return out;
}

}  // namespace md
