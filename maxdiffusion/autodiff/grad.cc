#include "maxdiffusion/autodiff/grad.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <unordered_set>

#include "maxdiffusion/autodiff/recompute.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {
namespace {

std::string place(const Node& n) { return n.path->empty() ? "the top level" : *n.path; }

/// During its lifetime, new nodes of the graph are marked as backward. The path is set per rule and restored at the
/// end.
class BackwardScope {
 public:
  explicit BackwardScope(Graph& g) : graph_(g), backward_(g.set_backward(true)), path_(g.set_path(nullptr)) {
    g.set_path(path_);
  }
  ~BackwardScope() {
    graph_.set_backward(backward_);
    graph_.set_path(path_);
  }
  BackwardScope(const BackwardScope&) = delete;

 private:
  Graph& graph_;
  bool backward_;
  const std::string* path_;
};

class Sweep {
 public:
  static Grads sweep_into(const std::vector<Tensor>& ys, const Grads& dys, const std::vector<Tensor>& xs, Graph& into,
                          ForwardView& view) {
    if (ys.empty()) return Grads(xs.size());
    Sweep sweep(ys[0].graph(), into, view, xs);
    for (size_t i = 0; i < ys.size(); ++i) sweep.seed(ys[i], dys[i]);
    sweep.run();
    return sweep.take(xs);
  }

 private:
  Sweep(Graph& forward, Graph& into, ForwardView& base, const std::vector<Tensor>& xs)
      : forward_(forward),
        into_(into),
        requested_(xs.begin(), xs.end()),
        begin_(first_of(forward, xs)),
        end_(forward.nodes().size()),
        recompute_(forward, into, base, cotangents_) {
    for (size_t i = begin_; i < end_; ++i) {
      const Node* n = forward_.nodes()[i].get();
      if (n->op->vjp == no_gradient) continue;
      for (Tensor t : n->inputs) {
        if (!active(t)) continue;
        active_.insert(n);
        break;
      }
    }
  }

  static size_t first_of(const Graph& forward, const std::vector<Tensor>& xs) {
    int first = std::numeric_limits<int>::max();
    for (Tensor x : xs) first = std::min(first, x.node()->id);
    const auto& nodes = forward.nodes();
    auto it = std::partition_point(nodes.begin(), nodes.end(), [&](const auto& n) { return n->id < first; });
    return static_cast<size_t>(it - nodes.begin());
  }

  void seed(Tensor y, Tensor dy) {
    if (!dy) return;
    check(dy.shape() == y.shape(), Code::invalid_graph, "vjp: cotangent {} for a value {} of {} at {}",
          to_string(dy.shape()), to_string(y.shape()), y.node()->op->name, place(*y.node()));
    arrive(y, dy);
  }

  void run() {
    BackwardScope scope(into_);
    for (size_t i = end_; i-- > begin_;) {
      Node& n = *forward_.nodes()[i];
      if (active_.contains(&n)) visit(n);
    }
  }

  std::vector<Tensor> take(const std::vector<Tensor>& xs) {
    std::vector<Tensor> grads;
    for (Tensor x : xs) {
      auto it = cotangents_.find(x);
      grads.push_back(it == cotangents_.end() ? Tensor() : it->second);
    }
    recompute_.finish(grads);
    return grads;
  }

  bool active(Tensor t) const { return is_float(t.dtype()) && (active_.contains(t.node()) || requested_.contains(t)); }

  void arrive(Tensor t, Tensor dt) {
    if (!active(t)) return;
    dt = into_.capture(dt);
    Tensor& sum = cotangents_[t];
    sum = sum ? add(sum, dt) : dt;
  }

  void visit(Node& n) {
    bool any = false;
    for (size_t i = 0; i < n.outputs.size() && !any; ++i) any = cotangents_.contains(n.out(static_cast<int>(i)));
    if (!any) return;
    check(n.op->vjp != nullptr, Code::invalid_graph, "grad: {} has no gradient rule, at {}", n.op->name, place(n));
    into_.set_path(n.path);
    ForwardView& view = recompute_.view(n.remat_region);
    std::vector<Tensor> in, out, dys;
    std::vector<bool> needs;
    for (Tensor t : n.inputs) {
      in.push_back(view.value(t));
      needs.push_back(active(t));
    }
    for (size_t i = 0; i < n.outputs.size(); ++i) {
      Tensor t = n.out(static_cast<int>(i));
      out.push_back(view.value(t));
      auto it = cotangents_.find(t);
      dys.push_back(it == cotangents_.end() ? Tensor() : it->second);
    }
    into_.set_path(n.path);
    const VjpCtx ctx(n, std::move(in), std::move(out), std::move(dys), std::move(needs), into_, view, &sweep_into);
    Grads grads;
    try {
      grads = n.op->vjp(ctx);
    } catch (Error& e) {
      e.note(fmt::format("in the gradient of {} at {}", n.op->name, place(n)));
      throw;
    }
    check(grads.size() == n.inputs.size(), Code::invalid_graph,
          "grad: the rule of {} returned {} cotangents for {} inputs, at {}", n.op->name, grads.size(), n.inputs.size(),
          place(n));
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i]) continue;
      const Shape& expected = n.inputs[i].shape();
      check(grads[i].shape() == expected, Code::invalid_graph,
            "grad: the rule of {} returned a cotangent {} for input {}, which is {}, at {}", n.op->name,
            to_string(grads[i].shape()), i, to_string(expected), place(n));
      arrive(n.inputs[i], grads[i]);
    }
  }

  Graph& forward_;
  Graph& into_;
  const std::set<Tensor> requested_;
  const size_t begin_;                      // earlier nodes depend on no x
  const size_t end_;                        // later nodes are the sweep's own
  std::unordered_set<const Node*> active_;  // nodes on a path from an x
  std::map<Tensor, Tensor> cotangents_;
  Recompute recompute_;
};

}  // namespace

std::vector<Tensor> vjp(const std::vector<Tensor>& ys, const std::vector<Tensor>& dys, const std::vector<Tensor>& xs) {
  check(ys.size() == dys.size(), Code::invalid_graph, "vjp: {} values, {} cotangents", ys.size(), dys.size());
  if (ys.empty()) return Grads(xs.size());
  // The sweep runs in the graph of the ys, so that a gradient can be taken inside a loop body.
  std::vector<Tensor> present = ys;
  for (Tensor dy : dys)
    if (dy) present.push_back(dy);
  Graph& graph = innermost(present);
  std::vector<Tensor> inner_ys, inner_xs;
  for (Tensor y : ys) inner_ys.push_back(graph.capture(y));
  for (Tensor x : xs) inner_xs.push_back(graph.capture(x));
  DirectView view;
  return Sweep::sweep_into(inner_ys, dys, inner_xs, graph, view);
}

std::vector<Tensor> grad(Tensor loss, const std::vector<Tensor>& xs) {
  check(static_cast<bool>(loss), Code::invalid_graph, "grad: the loss is absent");
  check(is_float(loss.dtype()) && loss.rank() == 0, Code::invalid_graph,
        "grad: the loss must be a floating scalar, found {}", to_string(loss.shape()));
  return vjp({loss}, {full_like(loss, 1.0)}, xs);
}

}  // namespace md
