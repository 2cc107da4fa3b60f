// The backward side of `checkpoint`: when the sweep reaches a region, the values that its policy does not store are
// cloned behind one optimization barrier with the incoming cotangents.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// The recomputed regions of one sweep over `forward`.
class Recompute {
 public:
  Recompute(const Graph& forward, Graph& into, ForwardView& base, std::map<Tensor, Tensor>& cotangents);
  ~Recompute();

  /// The view of a node in `region`. The first call for a region copies it and replaces the cotangents of its values
  /// by the barrier's.
  ForwardView& view(int region);
  /// Removes operands that `results` do not need from the barriers, so that they do not extend lifetimes.
  void finish(std::vector<Tensor>& results);

 private:
  class Region;
  Tensor fetched(Tensor forward, ForwardView& outer);
  const Graph& forward_;
  Graph& into_;
  ForwardView& base_;
  std::map<Tensor, Tensor>& cotangents_;
  size_t forward_end_, into_start_;
  std::map<int, std::unique_ptr<Region>> regions_;
  std::vector<Node*> barriers_;
  std::map<Tensor, Tensor> in_host_memory_;  // offloaded values
};

}  // namespace md
