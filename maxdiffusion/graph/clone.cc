#include "maxdiffusion/graph/clone.h"

#include <map>

namespace md {

Node* clone_node(const Node& node, Graph& into, const ValueMap& value) {
  size_t operands = node.inputs.size();
  for (const auto& body : node.bodies) operands -= body->captures().size();
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < operands; ++i) inputs.push_back(value(node.inputs[i]));
  std::vector<std::shared_ptr<Graph>> bodies;
  for (const auto& body : node.bodies) bodies.push_back(clone_body(*body, into, value));
  const std::string* path = into.set_path(node.path);
  Node* copy = into.add(*node.op, std::move(inputs), node.attributes, std::move(bodies));
  into.set_path(path);
  copy->name = node.name;
  return copy;
}

std::vector<Tensor> clone_results(const Graph& body, Graph& into, const ValueMap& value) {
  std::map<Tensor, Tensor> copies;
  auto mapped = [&](Tensor t) {
    auto it = copies.find(t);
    return it == copies.end() ? value(t) : it->second;
  };
  const auto live = live_nodes(body, body.results);
  for (const auto& n : body.nodes()) {
    if (n->op == &kParameter || !live.contains(n.get())) continue;
    Node* copy = clone_node(*n, into, mapped);
    copy->remat_region = n->remat_region;
    for (size_t i = 0; i < n->outputs.size(); ++i) {
      int k = static_cast<int>(i);
      copies[n->out(k)] = copy->out(k);
    }
  }
  std::vector<Tensor> results;
  for (Tensor t : body.results) results.push_back(mapped(t));
  return results;
}

std::shared_ptr<Graph> clone_body(const Graph& body, Graph& parent, const ValueMap& outer_value) {
  auto copy = std::make_shared<Graph>(parent, body.options());
  std::map<Tensor, Tensor> parameters;
  for (Tensor a : body.arguments()) parameters[a] = copy->argument(a.shape());
  for (const auto& [outer, inner] : body.captures()) parameters[inner] = copy->add_capture(outer_value(outer));
  copy->results = clone_results(body, *copy, [&](Tensor t) { return parameters.at(t); });
  return copy;
}

}  // namespace md
