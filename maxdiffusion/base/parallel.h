// A loop over independent items on all cores.
#pragma once

#include <cstdint>
#include <functional>

namespace md {

/// Calls f(i, worker) once for each i in [0, n), in any order; worker < parallel_workers(n, most) names the thread. The
/// first exception stops the loop and is rethrown here.
void parallel_for(int64_t n, const std::function<void(int64_t, int)>& f, int most = 0);
/// Number of threads that parallel_for uses for n items: the number of cores, or `most` if > 0; at most n.
int parallel_workers(int64_t n, int most = 0);

}  // namespace md
