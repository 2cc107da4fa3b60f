#include "maxdiffusion/encoders/adapter_image.h"

namespace md {

AdapterFields encode_adapter_image(const Devices& devices, const ImageAdapter& adapter, const WeightsOf& weights,
                                   const ScopeOptions& scope, const CompileConfig& compile, const HostArray& image,
                                   const MediaSize& size) {
  const HostArray prepared = adapter.prepare(image, size);
  const ScopeOptions options = text_encoder_options(scope, {});
  AdapterFields out;
  for (const bool with_image : {true, false}) {
    Graph g(devices.graph_options());
    ParamTable params;
    const Tensor input = g.input("image", prepared.shape());
    std::map<std::string, Scope> scopes;
    const Models models = [&](const std::string& component) {
      return scopes.try_emplace(component, Scope(g, params, component, options)).first->second;
    };
    for (const auto& [name, tensor] : adapter.encode(models, input, with_image)) g.output(name, tensor);
    const Program program = md::compile(devices, g, compile, adapter.name);
    HostArrays values;
    for (const std::string& component : adapter.components) values.merge(weights(params, component));
    ArrayMap arrays, feed;
    place(devices, program, values, arrays);
    place(devices, program, HostArrays{{"image", prepared}}, feed);
    for (const auto& [name, a] : program.run(feed, arrays))
      (with_image ? out.image : out.without)[name] = devices.get(a);
  }
  return out;
}

}  // namespace md
