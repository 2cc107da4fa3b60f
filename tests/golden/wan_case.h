// Runs Wan's transformer on a golden's inputs; "image" may be missing.
#pragma once

#include "maxdiffusion/models/wan_transformer.h"
#include "tests/golden/model_case.h"

namespace md {

inline NamedTensors run_wan(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  return {
      {"sample",
       wan_transformer(
           s, WanTransformerConfig::from_json(json),
           {.sample = in.at("sample"), .timestep = in.at("timestep"), .text = in.at("text"), .image = in["image"]})}};
}

}  // namespace md
