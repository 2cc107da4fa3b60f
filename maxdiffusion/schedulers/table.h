// What samplers share: rows of doubles as an f32 table, and one column of a row inside the graph.
#pragma once

#include <cmath>
#include <span>

#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

/// Noise-free limits divide by √ᾱ_T, which is 0 under zero terminal SNR; this stands in, as in diffusers.
inline constexpr double kTinyAlphaBar = 0x1p-24;

inline HostArray rows_of(const std::vector<std::vector<double>>& rows) {
  std::vector<float> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  const auto n = static_cast<int64_t>(rows.size());
  return HostArray::of<float>(Shape{DType::f32, {n, static_cast<int64_t>(flat.size()) / n}}, flat);
}

/// Column `i` of a row [columns], as a scalar.
inline Tensor column(Tensor row, int64_t i) { return reshape(slice(row, {i}, {i + 1}), {}); }

/// x0 = (first)·x + (second)·out at ᾱ, for a model that predicts `prediction_type`.
struct Combination {
  double sample, output;
};
inline Combination to_x0(const std::string& prediction_type, double abar) {
  if (prediction_type == "sample") return {0, 1};
  if (prediction_type == "v_prediction") return {std::sqrt(abar), -std::sqrt(1 - abar)};
  const double a = std::max(abar, kTinyAlphaBar);
  return {1 / std::sqrt(a), -std::sqrt(1 - a) / std::sqrt(a)};
}

}  // namespace md
