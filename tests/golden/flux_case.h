// Runs the transformers of FLUX.1 and FLUX.2 on a golden's inputs; "guidance" may be missing.
#pragma once

#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "tests/golden/model_case.h"

namespace md {

/// The goldens have different token grids: dev 3×4, schnell 2×5.
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

inline NamedTensors run_flux2(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  Flux2Inputs inputs{
      .sample = in.at("sample"), .timestep = in.at("timestep"), .text = in.at("text"), .guidance = in["guidance"]};
  for (int i = 0; in.contains("reference_" + std::to_string(i)); ++i)
    inputs.references.push_back(in.at("reference_" + std::to_string(i)));
  return {{"sample", flux2_transformer(s, Flux2TransformerConfig::from_json(json), inputs)}};
}

}  // namespace md
