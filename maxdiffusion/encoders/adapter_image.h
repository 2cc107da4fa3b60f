// Images of adapters (IP-Adapter, T2I-Adapter) as conditioning, computed once for all steps.
#pragma once

#include <memory>

#include "maxdiffusion/encoders/encoder_keys.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

/// An adapter's fields of one sample, [1, …], and those of guidance's samples without conditioning.
struct AdapterFields {
  HostArrays image, without;
};

/// An adapter's models on devices. Weights are read and a program compiled at the first image; images that are prepared
/// to another size need another program. Not thread safe.
class AdapterEncoder {
 public:
  AdapterEncoder(const Devices& devices, std::shared_ptr<const ImageAdapter> adapter, WeightsOf weights,
                 const ScopeOptions& scope, const CompileConfig& compile);
  /// `image`: u8 [H, W, 3] of any size, for samples of `size`.
  AdapterFields encode(const HostArray& image, const MediaSize& size);

 private:
  const Devices& devices_;
  std::shared_ptr<const ImageAdapter> adapter_;
  WeightsOf weights_;
  ScopeOptions scope_;
  CompileConfig compile_;
  ProgramCache programs_;
  ArrayMap arrays_;  // the weights
};

}  // namespace md
