#include "maxdiffusion/encoders/adapter_image.h"

namespace md {

AdapterEncoder::AdapterEncoder(const Devices& devices, std::shared_ptr<const ImageAdapter> adapter, WeightsOf weights,
                               const ScopeOptions& scope, const CompileConfig& compile)
    : devices_(devices),
      adapter_(std::move(adapter)),
      weights_(std::move(weights)),
      scope_(text_encoder_options(scope, {})),
      compile_(compile) {}

AdapterFields AdapterEncoder::encode(const HostArray& image, const MediaSize& size) {
  const HostArray prepared = adapter_->prepare(image, size);
  Graph g(devices_.graph_options());
  ParamTable params;
  const Models models = [&](const std::string& component) { return Scope(g, params, component, scope_); };
  const std::string without = "without_";
  const ImageAdapter::Fields fields = adapter_->encode(models, g.input("image", prepared.shape()));
  for (const auto& [name, tensor] : fields.image) g.output(name, tensor);
  for (const auto& [name, tensor] : fields.without) g.output(without + name, tensor);
  const std::shared_ptr<const Program> program = programs_.compile(devices_, g, compile_, adapter_->name);
  if (arrays_.empty()) {
    HostArrays values;
    for (const std::string& component : adapter_->components) values.merge(weights_(params, component));
    place(devices_, *program, values, arrays_);
  }
  ArrayMap feed;
  place(devices_, *program, HostArrays{{"image", prepared}}, feed);
  AdapterFields out;
  for (const auto& [name, a] : program->run(feed, arrays_)) {
    const HostArray value = devices_.get(a);
    if (name.starts_with(without))
      out.without[name.substr(without.size())] = value;
    else
      out.image[name] = value;
  }
  out.without.insert(out.image.begin(), out.image.end());  // those that do not differ
  return out;
}

}  // namespace md
