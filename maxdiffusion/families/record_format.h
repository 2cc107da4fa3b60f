// Encoded samples of other programs: how a record stores one encoded sample.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

struct FamilySpec;

/// The base class stores unscaled moments and the conditioning under this program's names. Immutable; thread safe.
class RecordFormat {
 public:
  virtual ~RecordFormat() = default;
  /// Names of a record's arrays, with alternatives: "moments|latents".
  virtual std::vector<std::string> columns(const FamilySpec& spec) const;
  /// Records, stacked along axis 0 → fields of a training batch: "moments" or "latents", scaled, and the conditioning.
  virtual HostArrays from_records(const FamilySpec& spec, const HostArrays& records) const;
  /// One sample → a record. moments: [h, w, 2C] (mean, standard deviation), unscaled; text, conditioning: the caption's
  /// fields, and the latents of reference images; `noise(n)` returns n standard normal numbers.
  virtual HostArrays to_record(const FamilySpec& spec, const HostArray& moments, const HostArrays& text,
                               const HostArrays& conditioning,
                               const std::function<std::vector<float>(size_t n)>& noise) const;
};

/// The family's columns, and those of so many reference images (ReferenceImages::field).
std::vector<std::string> record_columns(const FamilySpec& spec, int64_t references);

std::shared_ptr<const RecordFormat> moment_records();
/// The formats of MaxDiffusion's programs for Stable Diffusion 1 and 2, SDXL, FLUX.1 and Wan.
std::shared_ptr<const RecordFormat> sd_records();
std::shared_ptr<const RecordFormat> sdxl_records();
std::shared_ptr<const RecordFormat> flux_records();
std::shared_ptr<const RecordFormat> wan_records();

}  // namespace md
