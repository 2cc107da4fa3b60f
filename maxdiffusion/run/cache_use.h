// Which items of a latent cache are used, by which run: kept in the cache, so that what nothing uses any more can be
// counted and removed.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/checkpoint/array_cache.h"

namespace md {

/// The latent cache of a run.
struct CachePlace {
  std::string folder;  // may be in a bucket; runs may share it
  std::string run;     // the run's folder; empty: none, nothing is recorded
};

/// Begins to record what the run uses; what it used before counts, too, until forget_used_items(). Called by one
/// process, as all of these.
void begin_used_items(const CachePlace& cache);
/// Forgets what the run used before begin_used_items(). Called when all its data is open.
void forget_used_items(const CachePlace& cache);
/// Records what the run uses: "NAME/ITEM", with ArrayCache::name. `what`: a name for these items, such as the data's;
/// it replaces what was recorded under this name.
void record_used_items(const CachePlace& cache, const std::string& what, const std::vector<std::string>& items);
/// Logs how many items of the cache no run uses, if there are any.
void report_unused_items(const CachePlace& cache);
/// Removes the items that no run uses, and what was recorded of runs whose folders do not exist any more. `folder`: a
/// cache, or the folder of a run that has one. Throws io if it is neither.
CachedItems prune_cache(const std::string& folder);

}  // namespace md
