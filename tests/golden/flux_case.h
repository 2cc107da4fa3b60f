// The transformer of Flux on the inputs of a golden; "guidance" may be missing.
#pragma once

#include "maxdiffusion/models/flux_transformer.h"
#include "tests/golden/model_case.h"

namespace md {

/// Goldens differ in their grids of tokens: of dev's 3×4, of schnell's 2×5.
inline NamedTensors run_flux(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const int64_t tokens = in.at("sample").dim(1), rows = tokens == 12 ? 3 : 2;
  return {{"sample", flux_transformer(s, FluxTransformerConfig::from_json(json),
                                      {.sample = in.at("sample"),
                                       .rows = rows,
                                       .columns = tokens / rows,
                                       .timestep = in.at("timestep"),
                                       .text = in.at("text"),
                                       .pooled = in.at("pooled"),
                                       .guidance = in["guidance"]})}};
}

}  // namespace md
