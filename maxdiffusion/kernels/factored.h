// Shared by kernels of updates by factored second moments (optim/factored.h): matrices in parts for threads, in passes
// with sums between them. A vector, whose second moments are whole, is a matrix of one row without means of rows.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "maxdiffusion/kernels/update.h"

namespace md {

/// Rows of one matrix, or several whole matrices of a layer.
struct FactoredPart {
  size_t array;
  int64_t at;                               // first element
  int64_t matrices, rows, columns;          // rows: of each matrix
  size_t layer;                             // in the wave
  float *row = nullptr, *column = nullptr;  // factors of rows and columns, after FactoredWave::take_sums
  float* column_sums = nullptr;             // written by a pass, as `row` is: sums of columns in this part, and of rows
  double updates = 0, weights = 0;          // written by a pass: sums of their squares

  int64_t size() const { return matrices * rows * columns; }
};

/// Gradients, clipped as (g limited to ±max_value) · factor.
struct FactoredGradients {
  float max_value, factor;
};

/// Sums of rows and columns of g² + eps.
void sum_squares(const FactoredPart& part, const FactoredGradients& o, float eps, const float* g);
/// Sums (g · factor of its row · factor of its column)² in part.updates, and p² in part.weights, unless p is null.
void sum_scaled_squares(FactoredPart& part, const FactoredGradients& o, const float* g, const float* p);
/// Numbers ahead of a loop that are prefetched.
inline constexpr int64_t kAhead = 512;

/// Layers that are updated together: as many as fill the threads and fit into their caches.
class FactoredWave {
 public:
  FactoredWave(ffi::ThreadPool& pool, const std::vector<Arrays>& lists, bool factored)
      : pool_(pool), lists_(lists), factored_(factored) {}
  /// Appends a layer of a parameter: its matrices begin at element `at`.
  void add(size_t array, int64_t at, int64_t matrices, int64_t rows, int64_t columns);
  int64_t size() const { return size_; }
  /// To be called once, after the last add().
  void allocate();

  void pass(const std::function<void(FactoredPart&)>& body);
  /// Moves the means in two lists toward those of the sums, mean · decay + new · added, and makes factors of them.
  void take_sums(size_t rows_list, size_t columns_list, float decay, float added);
  /// The root mean square of each layer, from the sums of its parts: FactoredPart::updates or weights.
  std::vector<float> root_mean_squares(double FactoredPart::*sum) const;
  /// The numbers of a list that has the parameters' shapes.
  float* numbers(const FactoredPart& part, size_t list) const {
    return static_cast<float*>(lists_[list].data[part.array]) + part.at;
  }

 private:
  struct Layer {
    size_t array;
    int64_t at, size;
  };
  /// The parts of one matrix, or one part.
  struct Group {
    size_t first, count;  // parts
    int64_t matrix;       // the first one's number among its parameter's
    int64_t rows;         // of a whole matrix
  };

  ffi::ThreadPool& pool_;
  const std::vector<Arrays>& lists_;
  bool factored_;
  int64_t size_ = 0, floats_ = 0;
  std::vector<Layer> layers_;
  std::vector<Group> groups_;
  std::vector<FactoredPart> parts_;
  std::vector<float> scratch_;
};

/// Calls update(wave) for waves of all layers. `layers`: the number of layers of each parameter.
void update_factored(ffi::ThreadPool& pool, const ffi::RemainingArgs& args, const std::vector<Arrays>& lists,
                     ffi::Span<const int64_t> layers, bool factored, const std::function<void(FactoredWave&)>& update);

}  // namespace md
