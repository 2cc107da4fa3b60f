#include "maxdiffusion/nn/scope.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/nn/quantization.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {

Scope::Scope(Graph& graph, ParamTable& table, std::string model, ScopeOptions options)
    : graph_(&graph), table_(&table), model_(std::move(model)), options_(std::move(options)) {}

Scope Scope::operator/(std::string_view name) const {
  Scope s = *this;
  if (!s.path_.empty()) s.path_ += '.';
  s.path_ += name;
  return s;
}

Tensor Scope::stored(std::string_view name, Dims dims, LogicalAxes& axes, Init init) const {
  Param p;
  p.path = (*this / name).path_;
  p.shape = {options_.weights, std::move(dims)};
  if (options_.replicated) axes.clear();
  axes.resize(p.shape.dims.size());
  p.axes = axes;
  p.init = init;
  p.trainable = options_.trainable;
  p.model = model_;
  return resolve(std::move(p));
}

std::vector<Tensor> Scope::stored_in_few_bits(const FewBits& as, const Weight& w) const {
  const std::string path = (*this / w.name).path_;
  std::vector<Tensor> all;
  for (const FewBitsArray& array : few_bits_arrays(as.type, w.dims)) {
    Param p;
    p.path = path + array.suffix;
    p.shape = array.shape;
    LogicalAxes axes(array.shape.dims.size());
    if (array.rows && !options_.replicated && !w.axes.empty()) {
      axes[0] = w.axes[0];
      if (all.empty()) axes = w.axes;
    }
    p.axes = axes;
    p.init = w.init;
    p.trainable = false;
    p.model = model_;
    p.few_bits = std::make_shared<const FewBitsPart>(FewBitsPart{as.type, all.size(), path, w.dims});
    all.push_back(gather_weight(resolve(std::move(p)), axes));
  }
  return all;
}

Tensor Scope::param(std::string_view name, Dims dims, LogicalAxes axes, Init init) const {
  const Tensor value = stored(name, std::move(dims), axes, init);
  return gather_weight(value, axes);
}

Tensor Scope::product(const Weight& w, Tensor x, const Product& f) const {
  if (!product_ && options_.few_bits && !options_.trainable && options_.few_bits->covers(path_, w.dims))
    return few_bits_product(options_.few_bits->type, w.dims, x, stored_in_few_bits(*options_.few_bits, w), f);
  if (!product_) {
    LogicalAxes axes = w.axes;
    const Tensor value = stored(w.name, w.dims, axes, w.init);
    const Tensor weight = cast(value, x.dtype());  // before gathering, to gather fewer bytes
    const auto& q = options_.quantization;
    return q && q->covers(path_) ? quantized_product(q, x, weight, axes, f) : f(x, gather_weight(weight, axes));
  }
  Scope before = *this;
  before.product_ = product_->before;
  return product_->source(before, w, x, f);
}

Tensor Scope::resolve(Param p) const {
  if (source_) return (*source_)(*below_, std::move(p));
  Graph* root = graph_;
  while (root->parent()) root = root->parent();
  p.trainable = p.trainable && options_.trainable;
  Param& param = table_->add(std::move(p));
  // Created outside any checkpoint region, because inputs are never recomputed.
  const int region = root->set_remat_region(0);
  param.value = root->input(param.input, param.shape, param.axes);
  if (param.in_host_memory) root->keep_in_host_memory(param.input);
  root->set_remat_region(region);
  return param.value;
}

Scope Scope::with(const ScopeOptions& options) const {
  Scope s = *this;
  s.options_ = options;
  if (below_) s.below_ = std::make_shared<const Scope>(below_->with(options));
  return s;
}

Scope Scope::frozen() const {
  ScopeOptions options = options_;
  options.trainable = false;
  return with(options);
}

Scope Scope::with_source(Source source) const {
  Scope s = *this;
  s.below_ = std::make_shared<const Scope>(*this);
  s.source_ = std::make_shared<const Source>(std::move(source));
  return s;
}

Scope Scope::with_product(ProductSource source) const {
  Scope s = *this;
  s.product_ = std::make_shared<const ProductLink>(ProductLink{std::move(source), product_});
  return s;
}

Scope Scope::with_random(Rng rng) const {
  Scope s = *this;
  s.random_ = rng;
  return s;
}

int64_t Scope::swapped_blocks(int64_t n) const {
  return table_->first_blocks(model_, path_, n, options_.blocks_to_swap);
}

Scope Scope::in_graph(Graph& body) const {
  Scope s = *this;
  s.graph_ = &body;
  return s;
}

}  // namespace md
