// The registry entry of a sampler: a new sampler is one file and one row of registry.cc.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

/// A value of the key `scheduler`, and the fields that it sets in scheduler_config.json.
struct SamplerName {
  const char* word;
  nlohmann::json fields = nlohmann::json::object();  // set to these values
  std::vector<const char*> aliases = {};             // normalized as by sampler_name()
  const char* flow_word = nullptr;                   // its replacement for flow-matching models; null: itself
};

struct SamplerClass {
  enum Models { noise, noise_or_flow, flow };  // supported models

  const char* name;  // of diffusers' class, without the prefix Flax
  std::unique_ptr<Scheduler> (*make)(const nlohmann::json& config);
  std::vector<SamplerName> words;
  /// Fields of scheduler_config.json that only this sampler reads (besides those of NoiseSchedule, SigmaGrid, spacing
  /// and make_scheduler).
  std::vector<const char*> fields = {};
  Models models = noise;
  const char* shift = nullptr;  // the shift field of flow-matching models
  bool thresholds = false;      // it reads thresholding
};

const std::vector<SamplerClass>& sampler_classes();
/// By the class's name, with or without Flax; null if unknown.
const SamplerClass* find_sampler(const std::string& class_name);

}  // namespace md
