// Tensor: a cheap value that names one output of one node. Widely included, so it stays small.
#pragma once

#include "maxdiffusion/base/shape.h"

namespace md {

class Graph;
class Node;

/// An empty Tensor (default) means "absent"; as a cotangent it means zero and costs nothing. Valid while its Graph
/// exists.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Node* node, int index) : node_(node), index_(index) {}

  explicit operator bool() const { return node_ != nullptr; }
  const Shape& shape() const;
  DType dtype() const { return shape().dtype; }
  const Dims& dims() const { return shape().dims; }
  int64_t rank() const { return shape().rank(); }
  int64_t dim(int64_t axis) const { return shape().dim(axis); }

  Node* node() const { return node_; }
  int index() const { return index_; }
  Graph& graph() const;
  bool operator==(const Tensor&) const = default;
  bool operator<(const Tensor& o) const { return node_ != o.node_ ? node_ < o.node_ : index_ < o.index_; }

 private:
  Node* node_ = nullptr;
  int index_ = 0;
};

}  // namespace md
