// The parameter table of one trace of a model: used for initialisation, sharding, optimizer state, checkpoint layout,
// weight loading and the parameter count in the log.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/layer_path.h"
#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/mesh/sharding.h"
#include "maxdiffusion/nn/few_bits.h"

namespace md {

/// Initialiser of a parameter. Values come from (seed, path) with a counter-based generator on the host, independent of
/// the device count and of other parameters.
struct Init {
  enum class Kind { zeros, ones, constant, normal, uniform, truncated_normal };
  Kind kind = Kind::zeros;
  double scale = 1;  // constant: the value; (truncated) normal: standard deviation; uniform: bound
  bool operator==(const Init&) const = default;
};

namespace init {
inline Init zeros() { return {Init::Kind::zeros}; }
inline Init ones() { return {Init::Kind::ones}; }
inline Init constant(double v) { return {Init::Kind::constant, v}; }
inline Init normal(double stddev) { return {Init::Kind::normal, stddev}; }
inline Init uniform(double bound) { return {Init::Kind::uniform, bound}; }
/// Truncated normal of variance 1/fan_in (LeCun); fan_in of a weight in PyTorch's layout is the product of all dims but
/// the first.
Init lecun_normal(const Dims& weight);
/// Uniform of variance 2/(fan_in + fan_out) (Glorot); fan_out is the first dim.
Init xavier_uniform(const Dims& weight);
}  // namespace init

struct Param {
  std::string path;  // "down_blocks.0.resnets.0.conv1.weight", as in the published files
  Shape shape;       // with dtype of storage (key weights_dtype)
  LogicalAxes axes;  // per dim, "" = none
  Init init;
  bool trainable = true;
  int64_t stacked = 0;  // n > 0: leading layer axis; stacked_part (base/layer_path.h) in place of the layer number
  bool in_host_memory = false;  // rows are copied to the device where a loop reads them (ScopeOptions::blocks_to_swap)
  std::string model;            // "unet", "vae", "text_encoder", …: the folder of its file
  Tensor value;                 // the graph input
  std::string input;            // its name: model + "/" + path
  std::shared_ptr<const FewBitsPart> few_bits = {};  // null: stored in its type, not quantized
};

class ParamTable {
 public:
  /// All parameters, in the order of Scope::param calls. References stay valid.
  const std::deque<Param>& params() const { return params_; }
  /// Throws invalid_graph when the path exists already.
  Param& add(Param p);
  const Param* find(const std::string& input) const;  // null when absent
  int64_t count() const;                              // elements of all parameters
  int64_t count(const std::string& model) const;

  /// Registers a stack of `n` blocks at `path` of a model, once for each path; returns how many of its first blocks are
  /// among the first `most` of all registered blocks of that model.
  int64_t first_blocks(const std::string& model, const std::string& path, int64_t n, int64_t most);
  /// Registered blocks of a model.
  int64_t blocks(const std::string& model) const;

 private:
  struct Stack {
    std::string model, path;
    int64_t blocks;
  };
  std::vector<Stack> stacks_;  // in the order of the trace
  std::deque<Param> params_;
  std::unordered_map<std::string, size_t> index_;  // by input
};

/// The initial value, from (seed, input); layers of a stacked parameter have the values of unstacked ones. Uses all
/// cores.
HostArray initial_value(const Param& p, uint64_t seed);
/// The initial value of a slice of the parameter; computes only that slice.
HostArray initial_value(const Param& p, uint64_t seed, const Slice& slice);

}  // namespace md
