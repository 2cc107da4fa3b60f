#include "maxdiffusion/encoders/text_encoder.h"

#include <algorithm>
#include <limits>
#include <set>
#include <span>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/runtime/memory.h"

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

/// Token ids and masks truncated to `rows` tokens after the template.
void truncate(const FamilySpec& spec, HostArrays& text, int64_t rows) {
  for (const Field& f : spec.text_fields(rows)) {
    HostArray& ids = text.at(f.name);
    ids = block(ids, 0, ids.dims()[0], 0, std::min(ids.dims()[1], f.shape.dims[0]));
  }
}

/// Encoded texts, with their fields [N, L, D] zero-padded to the length of the specification.
HostArrays zero_padded(const FamilySpec& spec, HostArrays fields) {
  for (const Field& f : spec.conditioning) {
    const auto found = fields.find(f.name);
    if (f.shape.rank() != 2 || found == fields.end() || found->second.dims()[1] == f.shape.dims[0]) continue;
    HostArray& a = found->second;
    HostArray longer = zeros_like(HostArray(batched(a.dims()[0], {a.dtype(), f.shape.dims})));
    set_block(longer, 0, 0, a);
    a = longer;
  }
  return fields;
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

TextEncoder::Compiled TextEncoder::compiled(const std::string& name, const Trace& trace) const {
  const auto models_in = [&](Graph& g, ParamTable& params, const Scope::Source& source) {
    return [&, source](const std::string& component) {
      const Scope scope(g, params, component, scope_);
      return source ? scope.with_source(source) : scope;
    };
  };
  std::set<std::string> unread;  // weights that no output depends on, as of layers after the last one that is used
  {
    Graph g(devices_.graph_options(&devices_.rules()));
    ParamTable params;
    trace(g, models_in(g, params, nullptr));
    std::vector<Tensor> outputs;
    for (const GraphOutput& out : g.outputs()) outputs.push_back(out.value);
    const std::unordered_set<const Node*> live = live_nodes(g, outputs);
    for (const Param& p : params.params())
      if (!live.contains(p.value.node())) unread.insert(p.model + "/" + p.path);
  }
  Graph g(devices_.graph_options(&devices_.rules()));
  ParamTable params;
  trace(g, models_in(g, params, [&unread](const Scope& below, Param p) {
          return unread.contains(p.model + "/" + p.path) ? full(below.graph(), 0, p.shape)
                                                         : below.resolve(std::move(p));
        }));
  Program program = md::compile(devices_, g, compile_, name);
  return {std::move(program), std::move(params)};
}

const Program& TextEncoder::program(const std::vector<int64_t>& key, const std::string& name, const Trace& trace) {
  auto found = programs_.find(key);
  if (found == programs_.end()) found = programs_.emplace(key, compiled(name, trace)).first;
  const auto& [program, params] = found->second;
  for (const std::string& component : family_->spec().text_components())
    if (std::ranges::any_of(params.params(),
                            [&](const Param& p) { return p.model == component && !arrays_.contains(p.input); })) {
      return_freed_memory();  // of programs that ran before
      place(devices_, program, read_(params, component), arrays_);
    }
  return program;
}

void TextEncoder::forget_weights() {
  arrays_.clear();
  seen_images_.clear(), seen_features_.clear();
}

int64_t TextEncoder::bytes_on_devices() const {
  int64_t bytes = 0;
  for (const auto& [name, a] : arrays_) bytes += a.shape().bytes();
  return bytes;
}

std::map<std::string, HostArrays> TextEncoder::weights() const {
  const FamilySpec& spec = family_->spec();
  Graph g;  // never compiled: it names the weights
  ParamTable params;
  const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
  // If the family always has images, with one, so that the weights of its encoder are in the table.
  const ReferenceImages::Seen seen = family_->edits() ? family_->seen({{64, 64}}) : ReferenceImages::Seen();
  Conditioning text;
  for (const Field& f : spec.text_fields(seen.tokens > 0 ? spec.text_rows(1, seen.tokens) : 0))
    text[f.name] = g.input(f.name, batched(1, f.shape));
  if (!seen.sizes.empty()) {
    const Tensor pixels = g.input("pixels", {DType::f32, {1, seen.sizes[0].height, seen.sizes[0].width, 3}});
    text[ReferenceImages::seen_field(0)] = family_->reference_images()->features(models, pixels);
  }
  family_->encode_text(models, text, 0);
  std::map<std::string, HostArrays> out;
  for (const std::string& component : spec.text_components())
    out[component] = as_arrays(published(params, component, as_shards(read_(params, component))));
  return out;
}

HostArray TextEncoder::features(const std::vector<std::vector<HostArray>>& images, size_t i, int64_t batch) {
  const ReferenceImages& references = *family_->reference_images();
  const int64_t n = std::ssize(images);
  HostArray out;
  for (int64_t from = 0; from < n; from += batch) {
    HostArray pixels;
    const int64_t together = std::min(batch, n - from);
    for (int64_t k = 0; k < together; ++k) {
      const HostArray one = references.pixels(images[static_cast<size_t>(from + k)].at(i));
      add_rows(pixels, together, k, one.reshaped(batched(1, one.shape()).dims));
    }
    pixels = rows(pixels, 0, batch);
    std::vector<int64_t> key = {-1};
    key.insert(key.end(), pixels.dims().begin(), pixels.dims().end());
    const Program& encoder = program(key, "image_encoder", [&](Graph& g, const Models& models) {
      const Tensor in = g.input("pixels", pixels.shape(), axis::of_batch(pixels.dims().size()));
      g.output("features", references.features(models, in));
    });
    ArrayMap feed;
    place(devices_, encoder, HostArrays{{"pixels", pixels}}, feed);
    add_rows(out, n, from, devices_.get(encoder.run(feed, arrays_).at("features")));
    images_encoded_ += together;
  }
  return out;
}

const HostArrays& TextEncoder::features(const std::vector<HostArray>& images) {
  const auto equal = [](const HostArray& a, const HostArray& b) {
    return a.dims() == b.dims() && std::ranges::equal(a.view<uint8_t>(), b.view<uint8_t>());
  };
  if (std::ranges::equal(images, seen_images_, equal)) return seen_features_;
  seen_images_.clear(), seen_features_.clear();
  for (size_t i = 0; i < images.size(); ++i)
    seen_features_[ReferenceImages::seen_field(i)] = features({images}, i, devices_.mesh().devices());
  seen_images_ = images;
  return seen_features_;
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
    truncate(spec, text, length);
  }
  if (spec.zero_text_padding) truncate(spec, text, FamilySpec::length_of_programs(longest_text(spec, text)));
  if (!seen.sizes.empty() && images.size() == 1)
    for (const auto& [name, a] : features(images.front())) text[name] = repeat_rows(a, std::ssize(captions));
  else
    for (size_t i = 0; i < seen.sizes.size(); ++i)
      text[ReferenceImages::seen_field(i)] = features(images, i, batch > 0 ? batch : batch_);
  HostArrays out = run(text, clip_skip, batch);
  if (spec.zero_text_padding) return zero_padded(spec, std::move(out));
  return length > 0
             ? spec.with_text_rows(std::move(out), spec.text_rows(std::numeric_limits<int32_t>::max(), seen.tokens))
             : out;
}

HostArrays TextEncoder::encode_tokens(const HostArrays& ids, int64_t clip_skip, int64_t batch) {
  return run(ids, clip_skip, batch);
}

HostArrays TextEncoder::run(const HostArrays& text, int64_t clip_skip, int64_t batch) {
  if (batch == 0) batch = batch_;
  std::vector<int64_t> key = {clip_skip, batch};
  for (const auto& [name, a] : text) key.insert(key.end(), a.dims().begin() + 1, a.dims().end());
  const Program& encoder = program(key, "text_encoder", [&](Graph& g, const Models& models) {
    Conditioning in;
    for (const auto& [name, a] : text) {
      const Shape shape = batched(batch, {a.dtype(), Dims(a.dims().begin() + 1, a.dims().end())});
      in[name] = g.input(name, shape, axis::of_batch(shape.dims.size()));
    }
    for (const auto& [name, tensor] : family_->encode_text(models, in, clip_skip)) g.output(name, tensor);
  });
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
