// Data that another program encoded: how one encoded sample is stored in a record.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

struct FamilySpec;

/// This class itself: moments, unscaled, and the conditioning, by the names that they have here. Immutable; thread
/// safe.
class RecordFormat {
 public:
  virtual ~RecordFormat() = default;
  /// Names of the arrays of a record, with alternatives: "moments|latents".
  virtual std::vector<std::string> columns(const FamilySpec& spec) const;
  /// Records, stacked on axis 0 → fields of a training batch: "moments" or "latents", scaled, and the conditioning.
  virtual HostArrays from_records(const FamilySpec& spec, const HostArrays& records) const;
  /// One sample → a record. moments: [h, w, 2C] (mean, standard deviation), unscaled; text, conditioning: the caption's
  /// fields; `noise(n)` gives n standard normal numbers.
  virtual HostArrays to_record(const FamilySpec& spec, const HostArray& moments, const HostArrays& text,
                               const HostArrays& conditioning,
                               const std::function<std::vector<float>(size_t n)>& noise) const;
};

std::shared_ptr<const RecordFormat> moment_records();
/// What MaxDiffusion's programs write for Stable Diffusion 1 and 2, SDXL, FLUX.1 and Wan.
std::shared_ptr<const RecordFormat> sd_records();
std::shared_ptr<const RecordFormat> sdxl_records();
std::shared_ptr<const RecordFormat> flux_records();
std::shared_ptr<const RecordFormat> wan_records();

}  // namespace md
