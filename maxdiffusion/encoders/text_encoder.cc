#include "maxdiffusion/encoders/text_encoder.h"

#include <algorithm>
#include <limits>
#include <span>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/mesh/logical_axes.h"

namespace md {

namespace {

/// Number of tokens of the longest text, after the template's.
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

const Program& TextEncoder::program(const std::vector<Field>& fields, int64_t clip_skip, int64_t batch) {
  std::vector<int64_t> key = {clip_skip, batch};
  for (const Field& f : fields) key.insert(key.end(), f.shape.dims.begin(), f.shape.dims.end());
  auto found = programs_.find(key);
  if (found == programs_.end()) {
    Graph g(devices_.graph_options(&devices_.rules()));
    ParamTable params;
    Conditioning text;
    for (const Field& f : fields) {
      const Shape shape = batched(batch, f.shape);
      text[f.name] = g.input(f.name, shape, axis::of_batch(shape.dims.size()));
    }
    const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
    for (const auto& [name, tensor] : family_->encode_text(models, text, clip_skip)) g.output(name, tensor);
    found = programs_.emplace(key, Compiled{md::compile(devices_, g, compile_, "text_encoder"), params}).first;
  }
  const auto& [program, params] = found->second;
  for (const std::string& component : family_->spec().text_components()) {
    const bool there = std::ranges::all_of(
        params.params(), [&](const Param& p) { return p.model != component || arrays_.contains(p.input); });
    if (there) continue;  // programs for images read more fields
    const HostArrays values = read_(params, component);
    place(devices_, program, values, arrays_);
    weights_[component] = as_arrays(published(params, component, as_shards(values)));
  }
  return program;
}

void TextEncoder::forget_weights() {
  arrays_.clear();
  weights_.clear();
}

const std::map<std::string, HostArrays>& TextEncoder::weights() {
  if (weights_.empty()) {
    // If the family always has images, includes their inputs, so that the weights that read them are in the table.
    const ReferenceImages* references = family_->reference_images();
    const ReferenceImages::Seen seen =
        family_->seen(std::vector<MediaSize>(static_cast<size_t>(references ? references->min_images : 0), {64, 64}));
    const FamilySpec& spec = family_->spec();
    std::vector<Field> fields = spec.text_fields(seen.tokens > 0 ? spec.text_rows(1, seen.tokens) : 0);
    for (size_t i = 0; i < seen.sizes.size(); ++i)
      fields.push_back({ReferenceImages::seen_field(i), {DType::f32, {seen.sizes[i].height, seen.sizes[i].width, 3}}});
    std::ranges::sort(fields, {}, &Field::name);  // the same order as in run
    program(fields, 0, batch_);
  }
  return weights_;
}

HostArrays TextEncoder::encode(const std::vector<std::string>& captions, const std::vector<std::string>& seconds,
                               int64_t clip_skip, int64_t batch, const std::vector<std::vector<HostArray>>& images) {
  const FamilySpec& spec = family_->spec();
  const std::vector<MediaSize> references =
      images.empty() ? std::vector<MediaSize>() : ReferenceImages::sizes_of(images.front());
  const ReferenceImages::Seen seen = family_->seen(references);
  HostArrays text = family_->tokenize(captions, references);
  if (!seconds.empty()) {
    HostArrays others = family_->tokenize(seconds, references);
    for (const std::string& name : family_->spec().second_text_fields()) text.at(name) = others.at(name);
  }
  int64_t length = 0;
  if (!spec.text_lengths.empty()) {
    length = spec.text_rows(longest_text(spec, text), seen.tokens);
    for (const Field& f : spec.text_fields(length)) {
      HostArray& ids = text.at(f.name);
      ids = block(ids, 0, ids.dims()[0], 0, f.shape.dims[0]);
    }
  }
  for (size_t i = 0; i < seen.sizes.size(); ++i)
    for (size_t k = 0; k < captions.size(); ++k) {
      const HostArray pixels = family_->reference_images()->pixels(images.at(images.size() == 1 ? 0 : k).at(i));
      add_rows(text[ReferenceImages::seen_field(i)], std::ssize(captions), static_cast<int64_t>(k),
               pixels.reshaped(batched(1, pixels.shape()).dims));
    }
  HostArrays out = run(text, clip_skip, batch);
  return length > 0
             ? spec.with_text_rows(std::move(out), spec.text_rows(std::numeric_limits<int32_t>::max(), seen.tokens))
             : out;
}

HostArrays TextEncoder::encode_tokens(const HostArrays& ids, int64_t clip_skip, int64_t batch) {
  return run(ids, clip_skip, batch);
}

HostArrays TextEncoder::run(const HostArrays& text, int64_t clip_skip, int64_t batch) {
  if (batch == 0) batch = batch_;
  std::vector<Field> fields;
  for (const auto& [name, a] : text) fields.push_back({name, {a.dtype(), Dims(a.dims().begin() + 1, a.dims().end())}});
  const Program& encoder = program(fields, clip_skip, batch);
  const int64_t n = text.begin()->second.dims()[0];
  HostArrays out;
  for (int64_t from = 0; from < n; from += batch) {
    HostArrays in;
    for (const auto& [name, ids] : text) in[name] = rows(ids, from, batch);
    ArrayMap feed;
    place(devices_, encoder, in, feed);
    for (const auto& [name, array] : encoder.run(feed, arrays_)) add_rows(out[name], n, from, devices_.get(array));
  }
  return out;
}

}  // namespace md
