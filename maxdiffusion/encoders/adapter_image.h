// Images of adapters (IP-Adapter, T2I-Adapter) as conditioning, computed once for all steps.
#pragma once

#include "maxdiffusion/encoders/encoder_keys.h"
#include "maxdiffusion/families/model_weights.h"

namespace md {

/// An adapter's fields of one sample, [1, …], and those of guidance's samples without conditioning. `image`: u8 [H, W,
/// 3]. Its models are on the devices only meanwhile.
struct AdapterFields {
  HostArrays image, without;
};
AdapterFields encode_adapter_image(const Devices& devices, const ImageAdapter& adapter, const WeightsOf& weights,
                                   const ScopeOptions& scope, const CompileConfig& compile, const HostArray& image,
                                   const MediaSize& size);

}  // namespace md
