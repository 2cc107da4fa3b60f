#include "maxdiffusion/encoders/text_encoder.h"

#include <algorithm>
#include <limits>
#include <span>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/mesh/logical_axes.h"

namespace md {

namespace {

/// Tokens of the longest of tokenized texts, behind the template's.
int64_t longest_text(const FamilySpec& spec, const HostArrays& text) {
  int64_t longest = 0;
  for (const TextEncoderSpec& e : spec.text_encoders) {
    const HostArray& mask = text.at(e.mask);
    const std::span<const int32_t> v = mask.view<int32_t>();
    const auto row = static_cast<size_t>(mask.dims()[1]);
    for (size_t i = 0; i < v.size(); ++i)
      if (v[i] != 0) longest = std::max(longest, static_cast<int64_t>(i % row) + 1 - e.template_tokens);
  }
  return longest;
}

}  // namespace

TextEncoder::TextEncoder(const Devices& devices, std::shared_ptr<const Family> family, int64_t batch, WeightsOf weights,
                         const ScopeOptions& scope, const CompileConfig& compile, const EncoderKeys& keys)
    : devices_(devices),
      family_(std::move(family)),
      batch_(batch),
      read_(std::move(weights)),
      scope_(text_encoder_options(scope, keys)),
      compile_(compile) {}

const Program& TextEncoder::program(int64_t clip_skip, int64_t batch, int64_t length) {
  if (const auto p = programs_.find({clip_skip, batch, length}); p != programs_.end()) return p->second;
  Graph g(devices_.graph_options(&devices_.rules()));
  ParamTable params;
  Conditioning text;
  for (const Field& f : family_->spec().text_fields(length)) {
    const Shape shape = batched(batch, f.shape);
    text[f.name] = g.input(f.name, shape, axis::of_batch(shape.dims.size()));
  }
  const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
  for (const auto& [name, tensor] : family_->encode_text(models, text, clip_skip)) g.output(name, tensor);
  const auto made =
      programs_.emplace(std::array{clip_skip, batch, length}, md::compile(devices_, g, compile_, "text_encoder")).first;
  if (!weights_.empty()) return made->second;
  for (const std::string& component : family_->spec().text_components()) {
    const HostArrays values = read_(params, component);
    place(devices_, made->second, values, arrays_);
    weights_[component] = as_arrays(published(params, component, as_shards(values)));
  }
  return made->second;
}

const std::map<std::string, HostArrays>& TextEncoder::weights() {
  if (weights_.empty()) program(0, batch_);
  return weights_;
}

HostArrays TextEncoder::encode(const std::vector<std::string>& captions, const std::vector<std::string>& seconds,
                               int64_t clip_skip, int64_t batch) {
  if (batch == 0) batch = batch_;
  const FamilySpec& spec = family_->spec();
  HostArrays text = family_->tokenize(captions);
  if (!seconds.empty()) {
    HostArrays others = family_->tokenize(seconds);
    for (const std::string& name : family_->spec().second_text_fields()) text.at(name) = others.at(name);
  }
  int64_t length = 0;
  if (!spec.text_lengths.empty()) {
    length = spec.text_rows(longest_text(spec, text));
    for (const Field& f : spec.text_fields(length)) {
      HostArray& ids = text.at(f.name);
      ids = block(ids, 0, ids.dims()[0], 0, f.shape.dims[0]);
    }
  }
  const Program& encoder = program(clip_skip, batch, length);
  const int64_t n = static_cast<int64_t>(captions.size());
  HostArrays out;
  for (int64_t from = 0; from < n; from += batch) {
    HostArrays in;
    for (const auto& [name, ids] : text) in[name] = rows(ids, from, batch);
    ArrayMap feed;
    place(devices_, encoder, in, feed);
    for (const auto& [name, array] : encoder.run(feed, arrays_)) add_rows(out[name], n, from, devices_.get(array));
  }
  return length > 0 ? spec.with_text_rows(std::move(out), spec.text_rows(std::numeric_limits<int32_t>::max())) : out;
}

}  // namespace md
