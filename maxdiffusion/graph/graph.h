// Graph: nodes in creation order, named inputs and outputs. Creation order is a topological order.
// A graph whose `parent` is set is the body of a loop: values of the parent used inside are captured on first use.
#pragma once

#include <any>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "maxdiffusion/graph/op.h"
#include "maxdiffusion/graph/tensor.h"

namespace md {

/// A logical name per dim ("" = none), as in `mesh/logical_axes.h`.
using LogicalAxes = std::vector<std::string>;

enum class Platform { cpu, gpu, tpu };

/// Whether and how a graph may call the kernels of maxdiffusion/kernels.
struct CpuKernels {
  bool callable = false;       // the plugin is the CPU's and supports FFI handlers
  bool f32_products = false;   // f32 matrix products are faster as calls than compiled (kernels/processor.h)
  bool bf16_products = false;  // bf16 matrix products are faster than widened to f32
};

/// Target of a graph. Plain data, so that graph/ and mesh/ do not include each other.
struct GraphOptions {
  std::vector<std::pair<std::string, int64_t>> mesh_axes;  // empty: one device
  /// Logical names and sizes to mesh axes; throws on a name without a rule. Null: everything is replicated.
  std::function<DimAxes(const LogicalAxes&, const Dims&)> resolve;
  /// Memory layout of an input with these logical axes and sizes: its axes, outermost first. Empty or null: row-major.
  std::function<Axes(const LogicalAxes&, const Dims&)> memory_order;
  Platform platform = Platform::cpu;
  std::string device_kind;
  CpuKernels cpu_kernels;
  bool nvidia_kernels = false;  // NVIDIA GPUs from Ampere on: cuDNN's attention and kernels of ours
  /// Median seconds of so many runs of a graph of one device, with zeros as inputs. Null: there is no device, or
  /// devices belong to several processes, which would measure different times.
  std::function<double(const Graph&, int64_t runs)> measure;
  bool manual = false;      // the body of a manual computation over all axes: shapes are those of one device
  int64_t devices() const;  // of the whole mesh
  bool one_device() const { return manual || devices() == 1; }
  /// Whether nodes of this graph may be calls of CPU kernels: the partitioner cannot partition those, and would gather
  /// every operand.
  bool calls_cpu_kernels() const { return cpu_kernels.callable && one_device(); }
};

/// What a rematerialisation region does with a value between forward and backward pass.
enum class Keep { keep, offload, recompute };
/// Decides per node of a region. Must be pure.
using RematPolicy = std::function<Keep(const Node&)>;
struct RematRegion {
  int parent = 0;  // enclosing region, 0 = none
  RematPolicy policy;
};

class Node {
 public:
  const OpDef* op = nullptr;
  std::vector<Tensor> inputs;  // operands, then the captures of each body
  std::any attributes;
  std::vector<Shape> outputs;
  std::vector<std::shared_ptr<Graph>> bodies;  // of loops
  Graph* graph = nullptr;
  const std::string* path = nullptr;  // scope path, interned by the graph
  int id = 0;
  int remat_region = 0;         // 0: none; otherwise set by autodiff/checkpoint
  std::string name;             // set by `named(x, "attn_output")`, read by remat policies
  bool backward = false;        // created by a gradient rule
  bool recomputed = false;      // a copy for the backward pass of a value that was not stored
  bool in_host_memory = false;  // see Graph::keep_in_host_memory; also of its captures

  template <class T>
  const T& attrs() const {
    return std::any_cast<const T&>(attributes);
  }
  Tensor out(int i = 0) { return Tensor(this, i); }
};

template <class T>
const T& VjpCtx::attrs() const {
  return node_.attrs<T>();
}

struct GraphInput {
  std::string name;
  Tensor value;
  LogicalAxes axes;          // empty: replicated
  DimAxes sharding;          // resolved from axes when the input was made
  Axes order;                // memory layout (GraphOptions::memory_order)
  std::optional<int> alias;  // index of the output that reuses this input's memory (donation)
  bool in_host_memory = false;
};
struct GraphOutput {
  std::string name;
  Tensor value;
  DimAxes sharding;  // empty: compiler's choice
  Axes order;        // memory layout
};

class Graph {
 public:
  explicit Graph(GraphOptions options = {});
  explicit Graph(Graph& parent);  // body of a loop in `parent`, which must outlive it
  Graph(Graph& parent, GraphOptions options);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  const GraphOptions& options() const { return options_; }
  Graph* parent() const { return parent_; }
  /// Whether this is the body of a loop, or a computation over all mesh axes inside one.
  bool in_loop() const;

  /// Names are unique. Throws invalid_graph if the name exists.
  Tensor input(const std::string& name, const Shape& shape, const LogicalAxes& axes = {});
  /// If `like` names an input, the output has its sharding and layout, as needed for state that is updated in a loop.
  void output(const std::string& name, Tensor value, const std::string& like = "");
  /// Donates input `input` to output `output`: shapes and shardings must agree.
  void alias(const std::string& input, const std::string& output);
  /// The input's array is in the host's memory (memory kind pinned_host), except on CPUs. Only loops read it, by row
  /// (ScanStep::slice), and copy the next row to the device while a step runs. Call it before the input is captured.
  void keep_in_host_memory(const std::string& input);
  const std::vector<GraphInput>& inputs() const { return inputs_; }
  const std::vector<GraphOutput>& outputs() const { return outputs_; }
  int input_index(const std::string& name) const;  // -1 when absent
  int output_index(const std::string& name) const;

  const std::deque<std::unique_ptr<Node>>& nodes() const { return nodes_; }
  /// Captures of the bodies are appended to the inputs, so that liveness and gradients see them.
  Node* add(const OpDef& op, std::vector<Tensor> inputs, std::any attributes = {},
            std::vector<std::shared_ptr<Graph>> bodies = {});

  /// For bodies: the inner value of an outer one; created on first use. Throws invalid_graph unless `outer` is an
  /// ancestor's.
  Tensor capture(Tensor outer);
  /// Adds a capture even if `outer` is already captured: copies of bodies keep the order of the original's captures.
  Tensor add_capture(Tensor outer);
  /// Outer values captured so far, in order, with the inner argument of each.
  const std::vector<std::pair<Tensor, Tensor>>& captures() const { return captures_; }
  /// Removes captures whose inner value is not in `live`. Loop ops call it before their node is created.
  void prune_captures(const std::unordered_set<const Node*>& live);
  /// Replaces the outer side of every capture.
  void map_captures(const std::function<Tensor(Tensor)>& outer);
  /// For bodies: an argument that the loop op provides (carry, slice, index). Not named, not an input().
  Tensor argument(Shape shape);
  const std::vector<Tensor>& arguments() const { return arguments_; }
  /// Selects and orders the arguments that the loop op will provide.
  void set_arguments(std::vector<Tensor> arguments) { arguments_ = std::move(arguments); }
  /// Results of a body, set by the loop op after tracing.
  std::vector<Tensor> results;

  /// Scope path of nodes created from now on; see PathScope.
  const std::string& path() const;
  const std::string* set_path(const std::string* interned);
  const std::string* intern(std::string path);
  /// Region of nodes created from now on (0 = none). Returns the previous one.
  int set_remat_region(int region);
  /// A region inside the current one.
  int new_remat_region(RematPolicy policy);
  const RematRegion& remat_region(int region) const;
  /// Whether nodes created from now on are marked as backward. Returns the previous value.
  bool set_backward(bool on);

 private:
  const Graph& root() const { return parent_ ? parent_->root() : *this; }
  Graph& root() { return parent_ ? parent_->root() : *this; }
  GraphOptions options_;
  Graph* parent_ = nullptr;
  std::deque<std::unique_ptr<Node>> nodes_;
  std::vector<GraphInput> inputs_;
  std::vector<GraphOutput> outputs_;
  std::map<std::string, int> input_names_, output_names_;
  std::vector<std::pair<Tensor, Tensor>> captures_;
  std::map<Tensor, Tensor> capture_of_;
  std::vector<Tensor> arguments_;
  std::map<std::string, std::unique_ptr<std::string>> paths_;
  const std::string* path_ = nullptr;
  std::deque<RematRegion> regions_;  // of the root; region r is entry r − 1
  int region_ = 0, next_id_ = 0;
  bool backward_ = false;
};

/// A part of a model as a function of tensors.
using GraphFn = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

/// The deepest graph among those of `tensors`, which must not be empty. Throws invalid_graph unless the others enclose
/// it.
Graph& innermost(const std::vector<Tensor>& tensors);

/// Nodes of `graph` that `results` depend on.
std::unordered_set<const Node*> live_nodes(const Graph& graph, const std::vector<Tensor>& results);

/// Floating-point operations of the nodes of `graph` that `results` depend on, as their records count them
/// (OpDef::flops). Recomputation is not counted.
double count_flops(const Graph& graph, const std::vector<Tensor>& results);

/// Nodes created during its lifetime get a scope path ("down_blocks.1.attentions.0"). Nests.
class PathScope {
 public:
  PathScope(Graph& graph, std::string path);
  ~PathScope();
  PathScope(const PathScope&) = delete;

 private:
  Graph& graph_;
  const std::string* previous_;
};

/// Nodes created during its lifetime are in a new rematerialisation region with this policy. Nests.
class RematScope {
 public:
  RematScope(Graph& graph, RematPolicy policy);
  ~RematScope();
  RematScope(const RematScope&) = delete;

 private:
  Graph& graph_;
  int previous_;
};

/// The record of graph inputs, loop arguments and captures.
extern const OpDef kParameter;

}  // namespace md
