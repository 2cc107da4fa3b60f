// What a sampler's file says of itself, so that a new sampler is that file and one row of registry.cc.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

/// A word of the key `scheduler`, and what it makes of a scheduler_config.json.
struct SamplerName {
  const char* word;
  nlohmann::json fields = nlohmann::json::object();  // set to these values
  std::vector<const char*> aliases = {};             // as sampler_name() spells them
  const char* flow_word = nullptr;                   // the word in its place for a flow-matching model; null: itself
};

struct SamplerClass {
  enum Models { noise, noise_or_flow, flow };  // what the models that it takes predict

  const char* name;  // of diffusers' class, without the prefix Flax
  std::unique_ptr<Scheduler> (*make)(const nlohmann::json& config);
  std::vector<SamplerName> words;
  /// Fields of scheduler_config.json that this file reads; those that NoiseSchedule, SigmaGrid, spacings and
  /// make_scheduler read are known for all.
  std::vector<const char*> fields = {};
  Models models = noise;
  const char* shift = nullptr;  // the field that shifts the levels of a flow-matching model
};

const std::vector<SamplerClass>& sampler_classes();
/// By the class's name, with or without Flax; null: there is none.
const SamplerClass* find_sampler(const std::string& class_name);

}  // namespace md
