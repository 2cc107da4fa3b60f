// The tiny models of tests/golden as a pipeline holds them, with the LoRA matrices of tests/golden/lora/files.*.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/lora/lora_file.h"
#include "tests/golden/model_case.h"

namespace md {

/// Component → folder under tests/golden, for "sdxl" and "sd15".
std::map<std::string, std::string> components_of(const std::string& which);

/// Names in LoRA files: kUnet only has the published ones, lora_names_of() also the original model's.
inline const LoraNames kUnet = {.denoisers = {"unet"}};
LoraNames lora_names_of(const std::string& which);

struct TracedModels {
  std::unique_ptr<Graph> graph;
  ParamTable params;
  HostArrays values;  // by input name, in storage dtype
};
TracedModels traced_models(const std::string& which, const ScopeOptions& options = {});

/// Runs a model of a case; returns the case's outputs by name.
NamedTensors run_model(const Scope& s, const nlohmann::json& config, NamedTensors& inputs);

/// One layout as diffusers loads it: see tools/golden/lora.py.
struct Layout {
  std::string which, name;
  nlohmann::json keys, metadata, adapter_config, factors;
};
inline void PrintTo(const Layout& l, std::ostream* os) { *os << l.which << "/" << l.name; }
std::vector<Layout> recorded_layouts();
Layout recorded_layout(const std::string& which, const std::string& name);
/// Writes the layout's file with matrices of this type, and returns its path.
std::string write_layout(const Layout& layout, const std::string& folder, DType dtype = DType::f32);
/// Maps "unet/conv_in/down" to the matrix, f32.
HostArrays recorded_matrices(const std::string& which);

/// Message and notes of the error that f throws; "no error" if it throws none.
std::string message_of(const std::function<void()>& f);

/// Models with all-zero weights: after merging, the weights are what a file adds.
struct LoraOverZeros : testing::Test {
  Graph graph;
  ParamTable params;
  LoraNames names{.denoisers = {"transformer"}};
  TemporaryFolder folder;

  LoraFile read(const std::string& path) const { return read_lora(path, LoraTargets(params, names)); }
  /// Parameters that the file changes, by input name.
  HostArrays changes(const LoraFile& lora) const;
  /// Expects pairs for the same layers, with equal values.
  static void expect_equal(const LoraFile& a, const LoraFile& b);
};

}  // namespace md
