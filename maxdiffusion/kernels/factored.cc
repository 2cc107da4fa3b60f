#include "maxdiffusion/kernels/factored.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace md {
namespace {

constexpr int64_t kPart = 1 << 16;           // elements
constexpr int64_t kWavePerThread = 1 << 19;  // elements

/// means = means · decay + sums / of · added, and sums = 1 / √means.
MD_VECTORIZED void move_means(float* __restrict means, float* __restrict sums, int64_t n, int64_t of, float decay,
                              float added) {
  const auto each = static_cast<float>(of);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    means[i] = means[i] * decay + sums[i] / each * added;
    sums[i] = 1 / std::sqrt(means[i]);
  }
}

MD_VECTORIZED void add_to(float* __restrict sums, const float* __restrict other, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] += other[i];
}

/// means = means · decay + sums / of · added, and sums = 1 / √(means / their mean).
MD_VECTORIZED void move_row_means(float* __restrict means, float* __restrict sums, int64_t n, int64_t of, float decay,
                                  float added) {
  const auto each = static_cast<float>(of);
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    means[i] = means[i] * decay + sums[i] / each * added;
    sum += static_cast<double>(means[i]);
  }
  const auto mean = static_cast<float>(sum / static_cast<double>(n));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] = 1 / std::sqrt(means[i] / mean);
}

}  // namespace

MD_VECTORIZED void sum_squares(const FactoredPart& part, const FactoredGradients& o, float eps,
                               const float* __restrict g) {
  const float max_value = o.max_value, factor = o.factor;
  const int64_t n = part.columns;
  const auto squared = [&](float value) {
    const float grad = limited(value, max_value) * factor;
    return grad * grad + eps;
  };
  std::fill_n(part.column_sums, part.matrices * n, 0.0f);
  float* row = part.row;
  for (int64_t matrix = 0; matrix < part.matrices; ++matrix) {
    float* __restrict columns = part.column_sums + matrix * n;
    int64_t i = 0;
    for (; i + 4 <= part.rows; i += 4, g += 4 * n, row += 4) {  // memory gives more when it is read at several places
      float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
      for (int64_t j = 0; j < n; ++j) {
        const float of0 = squared(g[j]), of1 = squared(g[n + j]), of2 = squared(g[2 * n + j]),
                    of3 = squared(g[3 * n + j]);
        columns[j] += (of0 + of1) + (of2 + of3);
        sum0 += of0;
        sum1 += of1;
        sum2 += of2;
        sum3 += of3;
      }
      row[0] = sum0;
      row[1] = sum1;
      row[2] = sum2;
      row[3] = sum3;
    }
    for (; i < part.rows; ++i, g += n) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) {
        const float of = squared(g[j]);
        columns[j] += of;
        sum += of;
      }
      *row++ = sum;
    }
  }
}

MD_VECTORIZED void sum_scaled_squares(FactoredPart& part, const FactoredGradients& o, const float* __restrict g,
                                      const float* __restrict p) {
  const float max_value = o.max_value, factor = o.factor;
  const int64_t n = part.columns;
  const float* row = part.row;
  part.updates = part.weights = 0;
  for (int64_t matrix = 0; matrix < part.matrices; ++matrix) {
    const float* __restrict columns = part.column + matrix * n;
    for (int64_t i = 0; i < part.rows; ++i, g += n) {
      const float of_row = *row++ * factor;
      float updates = 0, weights = 0;
      prefetch(g + kAhead, n);
      if (p == nullptr) {
#pragma omp simd reduction(+ : updates)
        for (int64_t j = 0; j < n; ++j) {
          const float update = limited(g[j], max_value) * of_row * columns[j];
          updates += update * update;
        }
      } else {  // together, because two arrays are read in little more time than one
        prefetch(p + kAhead, n);
#pragma omp simd reduction(+ : updates, weights)
        for (int64_t j = 0; j < n; ++j) {
          const float update = limited(g[j], max_value) * of_row * columns[j];
          updates += update * update;
          weights += p[j] * p[j];
        }
        p += n;
      }
      part.updates += static_cast<double>(updates);
      part.weights += static_cast<double>(weights);
    }
  }
}

void FactoredWave::add(size_t array, int64_t at, int64_t matrices, int64_t rows, int64_t columns) {
  const int64_t each = rows * columns, first = at / each;
  const auto part = [&](int64_t from, int64_t count, int64_t of_rows) {
    parts_.push_back(
        {.array = array, .at = from, .matrices = count, .rows = of_rows, .columns = columns, .layer = layers_.size()});
    floats_ += count * (of_rows + 2 * columns);
  };
  if (each <= kPart) {
    const int64_t together = kPart / each;
    for (int64_t m = 0; m < matrices; m += together) {
      part(at + m * each, std::min(together, matrices - m), rows);
      groups_.push_back({parts_.size() - 1, 1, first + m, rows});
    }
  } else {
    const int64_t together = std::max<int64_t>(1, kPart / columns);
    for (int64_t m = 0; m < matrices; ++m) {
      const size_t begin = parts_.size();
      for (int64_t row = 0; row < rows; row += together)
        part(at + m * each + row * columns, 1, std::min(together, rows - row));
      groups_.push_back({begin, parts_.size() - begin, first + m, rows});
    }
  }
  layers_.push_back({array, at, matrices * each});
  size_ += matrices * each;
}

void FactoredWave::allocate() {
  scratch_.resize(static_cast<size_t>(floats_));
  float* next = scratch_.data();
  const auto take = [&](int64_t n) { return std::exchange(next, next + n); };
  for (const Group& group : groups_) {  // the rows of a group are neighbours
    float* column = take(parts_[group.first].matrices * parts_[group.first].columns);
    for (size_t i = group.first; i < group.first + group.count; ++i) {
      FactoredPart& part = parts_[i];
      part.row = take(part.matrices * part.rows);
      part.column = column;
    }
    for (size_t i = group.first; i < group.first + group.count; ++i)
      parts_[i].column_sums = take(parts_[i].matrices * parts_[i].columns);
  }
}

void FactoredWave::pass(const std::function<void(FactoredPart&)>& body) {
  parallel_for(pool_, static_cast<int64_t>(parts_.size()), [&](int64_t i) { body(parts_[static_cast<size_t>(i)]); });
}

void FactoredWave::take_sums(size_t rows_list, size_t columns_list, float decay, float added) {
  parallel_for(pool_, static_cast<int64_t>(groups_.size()), [&](int64_t index) {
    const Group& group = groups_[static_cast<size_t>(index)];
    const FactoredPart& part = parts_[group.first];
    const int64_t columns = part.columns, rows = group.rows;
    const auto state = [&](size_t list, int64_t each) {
      return static_cast<float*>(lists_[list].data[part.array]) + group.matrix * each;
    };
    float *row = part.row, *column = part.column;
    for (int64_t matrix = 0; matrix < part.matrices; ++matrix, row += rows, column += columns) {
      const int64_t from = matrix * columns;
      std::copy_n(part.column_sums + from, columns, column);
      for (size_t i = group.first + 1; i < group.first + group.count; ++i)
        add_to(column, parts_[i].column_sums, columns);
      move_means(state(columns_list, columns) + from, column, columns, rows, decay, added);
      if (factored_)
        move_row_means(state(rows_list, rows) + matrix * rows, row, rows, columns, decay, added);
      else
        std::fill_n(row, rows, 1.0f);
    }
  });
}

std::vector<float> FactoredWave::root_mean_squares(double FactoredPart::*sum) const {
  std::vector<double> sums(layers_.size());
  for (const FactoredPart& part : parts_) sums[part.layer] += part.*sum;
  std::vector<float> roots;
  for (size_t i = 0; i < layers_.size(); ++i)
    roots.push_back(static_cast<float>(std::sqrt(sums[i] / static_cast<double>(layers_[i].size))));
  return roots;
}

void update_factored(ffi::ThreadPool& pool, const ffi::RemainingArgs& args, const std::vector<Arrays>& lists,
                     ffi::Span<const int64_t> layers, bool factored, const std::function<void(FactoredWave&)>& update) {
  const int64_t enough = kWavePerThread * std::max<int64_t>(1, pool.num_threads());
  std::unique_ptr<FactoredWave> wave;
  const auto finish = [&] {
    wave->allocate();
    update(*wave);
    wave.reset();
  };
  for (size_t array = 0; array < lists[0].sizes.size(); ++array) {
    const auto dims = args.get<ffi::AnyBuffer>(array)->dimensions();
    const int64_t each = lists[0].sizes[array] / layers[array];
    if (each == 0) continue;
    const int64_t columns = factored ? dims[dims.size() - 1] : each, rows = factored ? dims[dims.size() - 2] : 1;
    for (int64_t layer = 0; layer < layers[array]; ++layer) {
      if (!wave) wave = std::make_unique<FactoredWave>(pool, lists, factored);
      wave->add(array, layer * each, each / (rows * columns), rows, columns);
      if (wave->size() >= enough) finish();
    }
  }
  if (wave) finish();
}

}  // namespace md
