#include "maxdiffusion/lora/low_rank.h"

#include <algorithm>
#include <cmath>

// Eigen's headers do not compile without these warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <eigen3/Eigen/Eigenvalues>
#include <eigen3/Eigen/QR>
#include <eigen3/Eigen/SVD>
#pragma GCC diagnostic pop

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;
using Rows = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;

constexpr double kZero = 1e-7;  // singular values below this fraction of the largest are rounding errors

/// The array as a matrix [first size, product of the others].
Matrix matrix_of(const HostArray& array) {
  const HostArray a = array.cast(DType::f32);
  const int64_t rows = a.dims()[0];
  return Rows(a.view<float>().data(), rows, rows == 0 ? 0 : a.shape().elements() / rows).cast<double>();
}

HostArray array_of(const Matrix& m, Dims dims) {
  HostArray out(Shape{DType::f32, std::move(dims)});
  auto to = out.mutable_view<float>();
  for (Eigen::Index i = 0, n = 0; i < m.rows(); ++i)
    for (Eigen::Index k = 0; k < m.cols(); ++k, ++n) to[static_cast<size_t>(n)] = static_cast<float>(m(i, k));
  return out;
}

/// Number of largest values whose squares sum up to the fraction `energy`; at most `rank`, at least 1.
Eigen::Index rank_for(const Vector& values, int64_t rank, double energy) {
  Eigen::Index most = 0;
  while (most < values.size() && most < rank && values[most] > kZero * values[0]) ++most;
  const double target = energy * values.squaredNorm();
  double sum = 0;
  for (Eigen::Index r = 0; r < most; ++r) {
    sum += values[r] * values[r];
    if (sum >= target) return r + 1;
  }
  return std::max<Eigen::Index>(most, 1);
}

/// Factors from the singular values and the left and right singular vectors (columns). `weight`: sizes of the weight
/// that the matrices are for.
LowRankFactors thin(const Vector& values, const Matrix& left, const Matrix& right, Eigen::Index rank,
                    const Dims& weight) {
  const Vector roots = values.head(rank).cwiseMax(0).cwiseSqrt();
  Dims down = weight, up(weight.size(), 1);
  down[0] = up[1] = rank;
  up[0] = weight[0];
  const double all = values.squaredNorm();
  return {.down = array_of(roots.asDiagonal() * right.leftCols(rank).transpose(), down),
          .up = array_of(left.leftCols(rank) * roots.asDiagonal(), up),
          .explained_variance = all > 0 ? values.head(rank).squaredNorm() / all : 1};
}

}  // namespace

LowRankFactors truncated_svd(const HostArray& change, int64_t rank) {
  check(change.dims().size() >= 2 && rank > 0, Code::internal, "truncated_svd: rank {} of {}", rank,
        to_string(change.shape()));
  const Matrix d = matrix_of(change);
  // The squared singular values are the eigenvalues of the smaller of D·Dᵀ and Dᵀ·D. Computed in double, the error of
  // squaring is below the rounding of the float32 inputs.
  const bool wide = d.rows() <= d.cols();
  const Matrix square = wide ? Matrix(d * d.transpose()) : Matrix(d.transpose() * d);
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(square);
  check(solver.info() == Eigen::Success, Code::internal, "truncated_svd: no eigenvalues of {}",
        to_string(change.shape()));
  const Vector values = solver.eigenvalues().reverse().cwiseMax(0).cwiseSqrt();
  const Matrix vectors = solver.eigenvectors().rowwise().reverse();
  const Eigen::Index r = rank_for(values, rank, 1);
  Matrix other = wide ? Matrix(d.transpose() * vectors.leftCols(r)) : Matrix(d * vectors.leftCols(r));
  for (Eigen::Index i = 0; i < r; ++i) other.col(i) /= std::max(values[i], 1e-300);
  return thin(values, wide ? vectors : other, wide ? other : vectors, r, change.dims());
}

LowRankFactors resized(const LoraPair& pair, int64_t rank, double energy) {
  // up·down = Q₁·(R₁·R₂ᵀ)·Q₂ᵀ has the singular values of the small matrix R₁·R₂ᵀ.
  const Matrix up = matrix_of(pair.up), down = matrix_of(pair.down).transpose();
  auto factors = [](const Matrix& m) {
    const Eigen::HouseholderQR<Matrix> qr(m);
    const Eigen::Index k = std::min(m.rows(), m.cols());
    return std::pair<Matrix, Matrix>(qr.householderQ() * Matrix::Identity(m.rows(), k),
                                     qr.matrixQR().topRows(k).template triangularView<Eigen::Upper>());
  };
  const auto [q1, r1] = factors(up);
  const auto [q2, r2] = factors(down);
  const Eigen::JacobiSVD<Matrix> svd(r1 * r2.transpose(), Eigen::ComputeThinU | Eigen::ComputeThinV);
  Dims weight = pair.down.dims();
  weight[0] = pair.up.dims()[0];
  return thin(svd.singularValues(), q1 * svd.matrixU(), q2 * svd.matrixV(),
              rank_for(svd.singularValues(), rank, energy), weight);
}

}  // namespace md
