#include "maxdiffusion/graph/graph.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"

namespace md {

const Shape& Tensor::shape() const {
  check(node_ != nullptr, Code::invalid_graph, "an absent tensor has no shape");
  return node_->outputs[static_cast<size_t>(index_)];
}
Graph& Tensor::graph() const { return *node_->graph; }

VjpCtx::VjpCtx(const Node& node, std::vector<Tensor> in, std::vector<Tensor> out, std::vector<Tensor> dys,
               std::vector<bool> needs, Graph& into, ForwardView& view, SweepFn sweep)
    : node_(node),
      in_(std::move(in)),
      out_(std::move(out)),
      dys_(std::move(dys)),
      needs_(std::move(needs)),
      into_(into),
      view_(view),
      sweep_(sweep) {}

bool DirectView::at_hand(Tensor forward) { return forward.node()->op == &kParameter; }

Grads no_gradient(const VjpCtx& c) { return Grads(c.in_count()); }

const OpDef kParameter = {
    .name = "parameter",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.attrs<Shape>()}; },
    .emit = [](EmitCtx&) {},
    .vjp = no_gradient,
};

int64_t GraphOptions::devices() const {
  int64_t n = 1;
  for (const auto& axis : mesh_axes) n *= axis.second;
  return n;
}

Graph::Graph(GraphOptions options) : options_(std::move(options)) { path_ = intern(""); }

Graph::Graph(Graph& parent) : Graph(parent, parent.options_) {}
Graph::Graph(Graph& parent, GraphOptions options) : options_(std::move(options)), parent_(&parent) {
  path_ = parent.path_;
  backward_ = parent.backward_;
}

bool Graph::in_loop() const {
  for (const Graph* g = this; g->parent_; g = g->parent_)
    if (g->options_.manual == g->parent_->options_.manual) return true;
  return false;
}

Graph::~Graph() = default;

Tensor Graph::input(const std::string& name, const Shape& shape, const LogicalAxes& axes) {
  check(parent_ == nullptr, Code::invalid_graph, "input '{}': the body of a loop has no named inputs", name);
  check(!input_names_.contains(name), Code::invalid_graph, "input '{}' exists already", name);
  check(axes.empty() || axes.size() == shape.dims.size(), Code::invalid_graph, "input '{}': {} logical axes for {}",
        name, axes.size(), to_string(shape));
  GraphInput in{.name = name, .value = {}, .axes = axes, .sharding = {}, .order = {}, .alias = {}};
  if (!axes.empty() && options_.resolve) in.sharding = options_.resolve(axes, shape.dims);
  if (!axes.empty() && options_.memory_order) in.order = options_.memory_order(axes, shape.dims);
  in.value = add(kParameter, {}, shape)->out();
  input_names_[name] = static_cast<int>(inputs_.size());
  inputs_.push_back(std::move(in));
  return inputs_.back().value;
}

void Graph::keep_in_host_memory(const std::string& input) {
  const int i = input_index(input);
  check(i >= 0, Code::invalid_graph, "keep '{}' in the host's memory: no such input", input);
  GraphInput& in = inputs_[static_cast<size_t>(i)];
  in.in_host_memory = in.value.node()->in_host_memory = options_.platform != Platform::cpu;
}

void Graph::output(const std::string& name, Tensor value, const std::string& like) {
  check(static_cast<bool>(value), Code::invalid_graph, "output '{}' is absent", name);
  check(&value.graph() == this, Code::invalid_graph, "output '{}' belongs to another graph", name);
  check(!output_names_.contains(name), Code::invalid_graph, "output '{}' exists already", name);
  GraphOutput out{.name = name, .value = value, .sharding = {}, .order = {}};
  if (!like.empty()) {
    int i = input_index(like);
    check(i >= 0, Code::invalid_graph, "output '{}': there is no input '{}'", name, like);
    out.sharding = inputs_[static_cast<size_t>(i)].sharding;
    out.order = inputs_[static_cast<size_t>(i)].order;
    if (out.sharding.empty()) out.sharding.resize(value.dims().size());
  }
  output_names_[name] = static_cast<int>(outputs_.size());
  outputs_.push_back(std::move(out));
}

void Graph::alias(const std::string& input, const std::string& output) {
  int i = input_index(input), o = output_index(output);
  check(i >= 0 && o >= 0, Code::invalid_graph, "alias '{}' to '{}': no such {}", input, output,
        i < 0 ? "input" : "output");
  GraphInput& in = inputs_[static_cast<size_t>(i)];
  const GraphOutput& out = outputs_[static_cast<size_t>(o)];
  check(in.value.shape() == out.value.shape(), Code::invalid_graph, "alias '{}' {} to '{}' {}: shapes differ", input,
        to_string(in.value.shape()), output, to_string(out.value.shape()));
  check(in.order == out.order, Code::invalid_graph, "alias '{}' to '{}': their memory layouts differ", input, output);
  in.alias = o;
}

int Graph::input_index(const std::string& name) const {
  auto it = input_names_.find(name);
  return it == input_names_.end() ? -1 : it->second;
}
int Graph::output_index(const std::string& name) const {
  auto it = output_names_.find(name);
  return it == output_names_.end() ? -1 : it->second;
}

Node* Graph::add(const OpDef& op, std::vector<Tensor> inputs, std::any attributes,
                 std::vector<std::shared_ptr<Graph>> bodies) {
  auto node = std::make_unique<Node>();
  node->op = &op;
  node->inputs = std::move(inputs);
  node->attributes = std::move(attributes);
  for (const auto& body : bodies)
    for (const auto& capture : body->captures()) node->inputs.push_back(capture.first);
  node->bodies = std::move(bodies);
  node->graph = this;
  node->path = path_;
  node->remat_region = region_;
  node->backward = backward_;
  std::vector<Shape> shapes;
  for (Tensor t : node->inputs) {
    check(static_cast<bool>(t), Code::invalid_graph, "{}: an input is absent, at {}", op.name, *path_);
    shapes.push_back(t.shape());
  }
  try {
    node->outputs = op.infer({op, shapes, node->attributes});
  } catch (Error& e) {
    if (!path_->empty()) e.note("at " + *path_);
    throw;
  }
  node->id = root().next_id_++;
  nodes_.push_back(std::move(node));
  return nodes_.back().get();
}

Tensor Graph::capture(Tensor outer) {
  if (&outer.graph() == this) return outer;
  check(parent_ != nullptr, Code::invalid_graph,
        "{}: a value of another graph is used here; values made inside a loop leave it only as results",
        outer.node()->op->name);
  const Node& node = *outer.node();
  // A constant or a broadcast: clone it here instead of passing a large argument to the loop.
  int64_t read = 0;
  for (Tensor t : node.inputs) read += t.shape().bytes();
  const bool repeated = node.op->cheap && outer.shape().bytes() > read;
  Tensor from_parent = repeated ? outer : parent_->capture(outer);
  auto it = capture_of_.find(from_parent);
  if (it != capture_of_.end()) return it->second;
  if (!repeated) return capture_of_[from_parent] = add_capture(from_parent);
  std::vector<Tensor> inputs;
  for (Tensor t : node.inputs) inputs.push_back(capture(t));
  return capture_of_[outer] = add(*node.op, std::move(inputs), node.attributes)->out();
}

Tensor Graph::add_capture(Tensor outer) {
  check(parent_ != nullptr, Code::internal, "add_capture: only a body has captures");
  captures_.emplace_back(parent_->capture(outer), add(kParameter, {}, outer.shape())->out());
  captures_.back().second.node()->in_host_memory = outer.node()->in_host_memory;
  return captures_.back().second;
}

void Graph::prune_captures(const std::unordered_set<const Node*>& live) {
  std::erase_if(captures_, [&](const auto& c) { return !live.contains(c.second.node()); });
  std::erase_if(capture_of_, [&](const auto& c) { return !live.contains(c.second.node()); });
}

void Graph::map_captures(const std::function<Tensor(Tensor)>& outer) {
  capture_of_.clear();
  for (auto& [from, inner] : captures_) {
    from = outer(from);
    capture_of_.emplace(from, inner);
  }
}

Tensor Graph::argument(Shape shape) {
  arguments_.push_back(add(kParameter, {}, std::move(shape))->out());
  return arguments_.back();
}

const std::string& Graph::path() const { return *path_; }
const std::string* Graph::set_path(const std::string* interned) { return std::exchange(path_, interned); }
const std::string* Graph::intern(std::string path) {
  Graph& r = root();
  auto& slot = r.paths_[path];
  if (!slot) slot = std::make_unique<std::string>(std::move(path));
  return slot.get();
}
int Graph::set_remat_region(int region) { return std::exchange(region_, region); }
int Graph::new_remat_region(RematPolicy policy) {
  auto& regions = root().regions_;
  regions.push_back({region_, std::move(policy)});
  return static_cast<int>(regions.size());
}
const RematRegion& Graph::remat_region(int region) const { return root().regions_.at(static_cast<size_t>(region - 1)); }
bool Graph::set_backward(bool on) { return std::exchange(backward_, on); }

double count_flops(const Graph& graph, const std::vector<Tensor>& results) {
  const std::unordered_set<const Node*> live = live_nodes(graph, results);
  double flops = 0;
  for (const auto& node : graph.nodes())
    if (node->op->flops && !node->recomputed && live.contains(node.get())) flops += node->op->flops(*node);
  return flops;
}

std::unordered_set<const Node*> live_nodes(const Graph& graph, const std::vector<Tensor>& results) {
  std::unordered_set<const Node*> live;
  for (Tensor t : results) live.insert(t.node());
  for (auto it = graph.nodes().rbegin(); it != graph.nodes().rend(); ++it) {
    if (!live.contains(it->get())) continue;
    for (Tensor t : (*it)->inputs) live.insert(t.node());
  }
  return live;
}

PathScope::PathScope(Graph& graph, std::string path)
    : graph_(graph), previous_(graph.set_path(graph.intern(std::move(path)))) {}
PathScope::~PathScope() { graph_.set_path(previous_); }

RematScope::RematScope(Graph& graph, RematPolicy policy)
    : graph_(graph), previous_(graph.set_remat_region(graph.new_remat_region(std::move(policy)))) {}
RematScope::~RematScope() { graph_.set_remat_region(previous_); }

Graph& innermost(const std::vector<Tensor>& tensors) {
  auto encloses = [](const Graph* outer, const Graph* g) {
    while (g && g != outer) g = g->parent();
    return g == outer;
  };
  Graph* deepest = &tensors.at(0).graph();
  for (Tensor t : tensors)
    if (!encloses(&t.graph(), deepest)) deepest = &t.graph();
  for (Tensor t : tensors)
    check(encloses(&t.graph(), deepest), Code::invalid_graph,
          "{} at {}: a value of another graph is used here; values made inside a loop leave it only as results",
          t.node()->op->name, *t.node()->path);
  return *deepest;
}

std::vector<Tensor> apply_multi(const OpDef& op, const std::vector<Tensor>& inputs, std::any attributes) {
  check(!inputs.empty(), Code::invalid_graph, "{}: no inputs to take the graph from", op.name);
  for (Tensor t : inputs) check(static_cast<bool>(t), Code::invalid_graph, "{}: an input is absent", op.name);
  Graph& graph = innermost(inputs);
  std::vector<Tensor> local;
  for (Tensor t : inputs) local.push_back(graph.capture(t));
  Node* n = graph.add(op, std::move(local), std::move(attributes));
  std::vector<Tensor> out;
  for (size_t i = 0; i < n->outputs.size(); ++i) out.push_back(n->out(static_cast<int>(i)));
  return out;
}

Tensor apply(const OpDef& op, const std::vector<Tensor>& inputs, std::any attributes) {
  return apply_multi(op, inputs, std::move(attributes)).at(0);
}

Tensor apply_in(Graph& graph, const OpDef& op, std::any attributes) {
  return graph.add(op, {}, std::move(attributes))->out();
}

}  // namespace md
