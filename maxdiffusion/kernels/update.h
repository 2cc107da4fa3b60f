// Shared by kernels that update parameters: clipped gradients, moving averages, lists of arrays, and the loop over
// these.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {

inline float limited(float g, float max_value) { return std::min(std::max(g, -max_value), max_value); }
/// A limit that never clips.
inline constexpr float kNoLimit = std::numeric_limits<float>::infinity();
inline float limit_of(double max_value) { return max_value > 0 ? static_cast<float>(max_value) : kNoLimit; }

/// Reads numbers into the cache that a loop comes to soon. They may lie behind an array's end.
[[gnu::always_inline]] inline void prefetch(const float* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

MD_VECTORIZED inline void move_averages(float keep, const float* __restrict p, float* __restrict averages, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) averages[i] = p[i] + (averages[i] - p[i]) * keep;
}

/// What the kernel of an update takes before its attributes: the thread pool, rates f32, and lists of arrays.
inline auto update_binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().RemainingArgs().RemainingRets();
}

/// Splits the arguments into `count` lists of equal length: gradients, then the arrays that are updated in place as
/// results.
inline ffi::ErrorOr<std::vector<Arrays>> lists_of(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                                  size_t count) {
  const size_t n = args.size() / count;
  if (args.size() != count * n || rets.size() != (count - 1) * n)
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("update: operands are not lists of one length, results all but the first"));
  std::vector<Arrays> lists;
  for (size_t list = 0; list < count; ++list) {
    auto arrays = arrays_of(args, list * n, n);
    if (arrays.has_error()) return ffi::Unexpected(arrays.error());
    if (list > 0)
      if (auto error = move_to_results(*arrays, rets, (list - 1) * n); error.failure()) return ffi::Unexpected(error);
    lists.push_back(*arrays);
  }
  return lists;
}

/// Calls update(part, n) for parts of the lists, on all threads; part(i) is the part of list i, n numbers long. If
/// there are more than `updated` lists, list number `updated` holds moving averages of list 1: average = p + (average −
/// p) · keep.
template <class F>
void update_all(ffi::ThreadPool& pool, const std::vector<Arrays>& lists, size_t updated, float keep, const F& update) {
  const auto chunks = chunks_of(lists[0].sizes);
  parallel_for(pool, static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const Chunk& chunk = chunks[static_cast<size_t>(i)];
    constexpr int64_t kInCache = 1 << 13;  // elements in the first-level cache, where the average reads them again
    for (int64_t at = 0; at < chunk.size; at += kInCache) {
      const int64_t n = std::min(kInCache, chunk.size - at);
      const auto part = [&](size_t list) {
        return static_cast<float*>(lists[list].data[chunk.array]) + chunk.start + at;
      };
      update(part, n);
      if (lists.size() > updated) move_averages(keep, part(1), part(updated), n);
    }
  });
}

}  // namespace md
