// Loops and branches. A body is traced once, into its own graph; outer values are captured.
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Inputs of a scan body in addition to the carry.
class ScanStep {
 public:
  /// Scalar s32: 0 … n−1 (the row; if reversed, n−1 … 0).
  Tensor index() const { return index_; }
  /// Row `index` of a stacked outer value [n, …]; the same outer value gives the same argument.
  Tensor slice(Tensor stacked);
  Graph& body() const { return *body_; }

 private:
  friend struct ScanBuilder;
  Graph* body_ = nullptr;
  Tensor index_;
  int64_t length_ = 0;
  std::vector<std::pair<Tensor, Tensor>> slices_;  // (outer stacked, inner row)
};

struct ScanResult {
  std::vector<Tensor> carry;    // same shapes as the initial carry
  std::vector<Tensor> stacked;  // each body value [..], stacked to [n, ..]
};
using ScanBody = std::function<ScanResult(ScanStep& step, const std::vector<Tensor>& carry)>;

/// carry, y_i = body(i, carry) for i = 0 … length−1 (backwards when `reverse`). `init` must not be empty. Gradient: a
/// reversed scan; checkpoint regions decide what is stored or recomputed.
ScanResult scan(int64_t length, const std::vector<Tensor>& init, const ScanBody& body, bool reverse = false);

/// body(inputs) if `condition`, a pred scalar, holds, else `otherwise`, of the same shapes. What depends on the body's
/// arguments runs in that case alone; what the body computes from outer values only is computed in both. No gradient.
std::vector<Tensor> run_if(Tensor condition, const std::vector<Tensor>& inputs, const std::vector<Tensor>& otherwise,
                           const std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>& body);

}  // namespace md
