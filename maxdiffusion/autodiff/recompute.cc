#include "maxdiffusion/autodiff/recompute.h"

#include <unordered_map>
#include <unordered_set>

#include "maxdiffusion/graph/clone.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {

namespace {

/// The policy's decision for each node with results; absent: recomputed.
using Marks = std::unordered_map<const Node*, Keep>;

/// Marks the node that computes the results of `n`. A name on one result keeps all results of the operation, because
/// computing the others would run the whole operation again. A value with two names is stored on the device if either
/// name requests it.
void mark(const Node& n, Keep keep, Marks& marks) {
  const bool looks_through = n.op->same_as || (n.op->cheap && n.inputs.size() == 1);
  if (n.op->cheap && n.inputs.empty()) return;
  if (!looks_through) {
    auto [it, fresh] = marks.emplace(&n, keep);
    if (keep == Keep::keep) it->second = keep;
    return;
  }
  for (size_t i = 0; i < n.outputs.size(); ++i)
    mark(*n.inputs[n.op->same_as ? n.op->same_as(n, static_cast<int>(i)) : 0].node(), keep, marks);
}

}  // namespace

class Recompute::Region final : public ForwardView {
 public:
  explicit Region(ForwardView& outer) : outer_(outer) {}

  Tensor value(Tensor t) override {
    if (auto it = values_.find(t); it != values_.end()) return it->second;
    return copies_.contains(t.node()) ? t : outer_.value(t);
  }
  Node& home(Node& n) override {
    auto it = copy_of_.find(&n);
    return it == copy_of_.end() ? outer_.home(n) : *it->second;
  }
  void copy(Node& n, Graph& into) {
    Node* c = clone_node(n, into, [this](Tensor t) { return value(t); });
    c->recomputed = true;
    copy_of_[&n] = c;
    copies_.insert(c);
    for (size_t i = 0; i < n.outputs.size(); ++i) {
      int k = static_cast<int>(i);
      values_[n.out(k)] = c->out(k);
    }
  }
  bool at_hand(Tensor t) override { return values_.contains(t) || outer_.at_hand(t); }
  void bind(Tensor forward, Tensor value) { values_[forward] = value; }

 private:
  ForwardView& outer_;
  std::map<Tensor, Tensor> values_;
  std::unordered_map<const Node*, Node*> copy_of_;
  std::unordered_set<const Node*> copies_;
};

Recompute::Recompute(const Graph& forward, Graph& into, ForwardView& base, std::map<Tensor, Tensor>& cotangents)
    : forward_(forward),
      into_(into),
      base_(base),
      cotangents_(cotangents),
      forward_end_(forward.nodes().size()),
      into_start_(into.nodes().size()) {}

Recompute::~Recompute() = default;

ForwardView& Recompute::view(int region) {
  if (region == 0) return base_;
  if (auto it = regions_.find(region); it != regions_.end()) return *it->second;
  const RematRegion& info = forward_.remat_region(region);
  ForwardView& outer = view(info.parent);
  auto inside = [&](int r) {
    while (r != 0 && r != region) r = forward_.remat_region(r).parent;
    return r == region;
  };

  std::vector<Node*> members;
  Marks marks;
  for (size_t i = 0; i < forward_end_; ++i) {
    Node* n = forward_.nodes()[i].get();
    if (n->op == &kParameter || !inside(n->remat_region)) continue;
    members.push_back(n);
    if (const Keep keep = info.policy(*n); keep != Keep::recompute) mark(*n, keep, marks);
  }
  std::unordered_set<const Node*> copied;
  for (const Node* n : members)
    if (!marks.contains(n)) copied.insert(n);

  // Values that pass the barrier: inputs of copied nodes that are not copied themselves, and kept results. Without the
  // barrier the compiler would merge the copies with the forward pass and keep its values instead.
  std::vector<Tensor> entering, arrived;
  std::unordered_set<const Node*> constants;
  std::map<Tensor, bool> visited;
  auto enter = [&](Tensor t) {
    const bool is_constant = t.node()->op->cheap && t.node()->inputs.empty();
    if (!copied.contains(t.node()) && !is_constant && visited.emplace(t, true).second) entering.push_back(t);
  };
  for (Node* n : members) {
    for (Tensor t : n->inputs) enter(t);
    for (size_t i = 0; i < n->outputs.size(); ++i) {
      Tensor t = n->out(static_cast<int>(i));
      if (!copied.contains(n)) enter(t);
      if (cotangents_.contains(t)) arrived.push_back(t);
    }
  }
  std::vector<Tensor> tied;
  for (Tensor t : entering) {
    auto it = marks.find(t.node());
    tied.push_back(it != marks.end() && it->second == Keep::offload ? fetched(t, outer) : outer.value(t));
  }
  for (Tensor t : arrived) tied.push_back(cotangents_.at(t));

  auto& slot = regions_[region] = std::make_unique<Region>(outer);
  if (!tied.empty()) {
    std::vector<Tensor> barred = optimization_barrier(tied);
    barriers_.push_back(barred[0].node());
    for (size_t i = 0; i < entering.size(); ++i) slot->bind(entering[i], barred[i]);
    for (size_t i = 0; i < arrived.size(); ++i) cotangents_[arrived[i]] = barred[entering.size() + i];
  }
  for (Node* n : members)
    if (copied.contains(n)) slot->copy(*n, into_);
  return *slot;
}

/// Copies an offloaded value back to the device.
Tensor Recompute::fetched(Tensor forward, ForwardView& outer) {
  if (outer.at_hand(forward)) return outer.value(forward);
  Tensor& moved = in_host_memory_[forward];
  if (!moved) {
    const std::string* path = forward.graph().set_path(forward.node()->path);
    moved = place(forward, Memory::host);
    forward.graph().set_path(path);
  }
  return place(outer.value(moved), Memory::device);
}

void Recompute::finish(std::vector<Tensor>& results) {
  if (barriers_.empty()) return;
  std::unordered_map<const Node*, std::vector<bool>> used;  // per output, of new nodes
  auto use = [&](Tensor t) {
    auto& flags = used[t.node()];
    if (flags.empty()) flags.resize(t.node()->outputs.size());
    flags[static_cast<size_t>(t.index())] = true;
  };
  const std::unordered_set<const Node*> barriers(barriers_.begin(), barriers_.end());
  for (Tensor t : results)
    if (t) use(t);
  for (size_t i = into_.nodes().size(); i-- > into_start_;) {
    const Node* n = into_.nodes()[i].get();
    auto it = used.find(n);
    if (it == used.end()) continue;
    const std::vector<bool> flags = it->second;
    for (size_t k = 0; k < n->inputs.size(); ++k)
      if (!barriers.contains(n) || flags[k]) use(n->inputs[k]);
  }

  std::unordered_map<const Node*, std::vector<int>> renumbered;
  for (Node* b : barriers_) {
    auto it = used.find(b);
    if (it == used.end()) continue;
    std::vector<int>& number = renumbered[b];
    std::vector<Tensor> inputs;
    std::vector<Shape> outputs;
    for (size_t k = 0; k < b->inputs.size(); ++k) {
      number.push_back(it->second[k] ? static_cast<int>(inputs.size()) : 0);  // 0: only dead nodes read it
      if (!it->second[k]) continue;
      inputs.push_back(b->inputs[k]);
      outputs.push_back(b->outputs[k]);
    }
    b->inputs = std::move(inputs);
    b->outputs = std::move(outputs);
  }
  auto renumber = [&](Tensor t) {
    auto it = renumbered.find(t.node());
    return it == renumbered.end() ? t : Tensor(t.node(), it->second[static_cast<size_t>(t.index())]);
  };
  for (size_t i = into_start_; i < into_.nodes().size(); ++i) {
    Node* n = into_.nodes()[i].get();
    for (Tensor& t : n->inputs) t = renumber(t);
    for (const auto& body : n->bodies) body->map_captures(renumber);
  }
  for (Tensor& t : results) t = renumber(t);
}

}  // namespace md
