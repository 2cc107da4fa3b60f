// Scope: provides a layer's parameters. A value: path, options, and the parameter table that it fills. Layers are
// functions of a scope; variations (frozen, LoRA, quantized) are scopes, not changes to models.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/nn/param.h"
#include "maxdiffusion/ops/attention_parts.h"
#include "maxdiffusion/ops/random.h"

namespace md {

struct Quantization;  // nn/quantization.h
struct Perturbation;  // nn/perturbation.h

struct ScopeOptions {
  DType weights = DType::f32;      // storage of parameters (key weights_dtype)
  DType activations = DType::f32;  // compute dtype given to layers (key activations_dtype)
  Precision precision = Precision::default_;
  std::string attention = "dot_product";
  int64_t flash_min_seq_length = 256;
  AttentionBlocks attention_blocks = {};
  std::string remat = "NONE";
  RematNames remat_names = {};  // for remat CUSTOM
  bool scan_layers = false;     // repeated blocks as one loop over stacked parameters
  int64_t blocks_to_swap = 0;   // the matrices of so many blocks, if frozen, are in the host's memory; not on CPUs
  bool trainable = true;
  bool replicated = false;  // replicate parameters, whatever their axes
  double dropout = 0;       // probability of dropout layers, in [0, 1); no dropout without with_random
  std::shared_ptr<const Quantization> quantization = {};  // of layers' products; null: none
  std::shared_ptr<const Perturbation> perturbation = {};  // of some rows of the batch; null: none
  std::shared_ptr<const FewBits> few_bits = {};           // storage of matrices without gradients; null: `weights`
};

/// Arguments of Scope::param.
struct Weight {
  std::string name;
  Dims dims;
  LogicalAxes axes;
  Init init;
};
/// A layer's function of input and weight: linear in the weight, whose dim 0, of any size, becomes the last dim of the
/// result. It may be called later for gradients, so it must capture by value.
using Product = std::function<Tensor(Tensor x, Tensor weight)>;

class Scope {
 public:
  /// The root of one model: parameters are inputs of `graph` named `model + "/" + path`.
  Scope(Graph& graph, ParamTable& table, std::string model, ScopeOptions options = {});

  /// Child scope: "down_blocks.0" / "resnets.1".
  Scope operator/(std::string_view name) const;
  Scope operator/(int64_t index) const { return *this / std::to_string(index); }

  /// A parameter, in storage dtype. `axes`: one logical name per dim or empty. Throws if it exists. In the body of a
  /// loop the parameter belongs to the root graph and is captured.
  Tensor param(std::string_view name, Dims dims, LogicalAxes axes, Init init) const;
  /// The tensor of a complete parameter record, with its path from the root. Sources call it on the scope below for the
  /// unmodified tensor.
  Tensor resolve(Param p) const;

  /// f(x, w) for the parameter `w`, in the dtype of x. Layers pass f instead of using the weight's tensor, so that a
  /// variation can add a product without materializing the sum of weights. Quantized if the options say so.
  Tensor product(const Weight& w, Tensor x, const Product& f) const;

  const std::string& path() const { return path_; }
  const ScopeOptions& options() const { return options_; }
  DType dtype() const { return options_.activations; }
  Graph& graph() const { return *graph_; }
  /// Nodes created during the result's lifetime have this scope's path.
  PathScope path_scope() const { return PathScope(*graph_, path_); }

  Scope with(const ScopeOptions& options) const;
  /// Parameters below get no gradient and no optimizer state.
  Scope frozen() const;

  /// Creates the tensor of each parameter; variations (frozen, LoRA) override it. `below` is the scope without this
  /// source: below.resolve(p) is the unmodified tensor.
  using Source = std::function<Tensor(const Scope& below, Param)>;
  Scope with_source(Source source) const;
  /// Computes product(); variations override it. `before` is the scope at the layer's path without this source.
  using ProductSource = std::function<Tensor(const Scope& before, const Weight& w, Tensor x, const Product& f)>;
  Scope with_product(ProductSource source) const;
  /// With random numbers for dropout layers, derived from their paths. Not used for sampling and evaluation.
  Scope with_random(Rng rng) const;
  const std::optional<Rng>& random() const { return random_; }
  /// How many of the first of `n` blocks below this scope are swapped (ScopeOptions::blocks_to_swap).
  int64_t swapped_blocks(int64_t n) const;
  /// This scope for the body of a loop: path_scope() then names nodes of `body`.
  Scope in_graph(Graph& body) const;

 private:
  /// The arrays of a quantized matrix, gathered.
  std::vector<Tensor> stored_in_few_bits(const FewBits& as, const Weight& w) const;
  /// A stored parameter, sharded by `axes`; changes `axes` to those of its record.
  Tensor stored(std::string_view name, Dims dims, LogicalAxes& axes, Init init) const;

  Graph* graph_;
  ParamTable* table_;
  std::string model_, path_;
  ScopeOptions options_;
  std::shared_ptr<const Source> source_;
  std::shared_ptr<const Scope> below_;  // set with source_
  struct ProductLink {
    ProductSource source;
    std::shared_ptr<const ProductLink> before;
  };
  std::shared_ptr<const ProductLink> product_;
  std::optional<Rng> random_;
};

}  // namespace md
