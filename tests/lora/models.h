// The tiny models of tests/golden as a pipeline has them, with the LoRA matrices of tests/golden/lora/files.*.
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

/// What LoRA files call them: by published names alone, and by the original model's too.
inline const LoraNames kUnet = {.denoisers = {"unet"}};
LoraNames lora_names_of(const std::string& which);

struct TracedModels {
  std::unique_ptr<Graph> graph;
  ParamTable params;
  HostArrays values;  // by input name, in storage dtype
};
TracedModels traced_models(const std::string& which, const ScopeOptions& options = {});

/// A model of a case; the inputs and outputs of the case by their names.
NamedTensors run_model(const Scope& s, const nlohmann::json& config, NamedTensors& inputs);

/// One layout as diffusers loads it: see tools/golden/lora.py.
struct Layout {
  std::string which, name;
  nlohmann::json keys, metadata, adapter_config, factors;
};
inline void PrintTo(const Layout& l, std::ostream* os) { *os << l.which << "/" << l.name; }
std::vector<Layout> recorded_layouts();
Layout recorded_layout(const std::string& which, const std::string& name);
/// Writes the layout's file, with matrices of this type, and returns its path.
std::string write_layout(const Layout& layout, const std::string& folder, DType dtype = DType::f32);
/// "unet/conv_in/down" → the matrix, f32.
HostArrays recorded_matrices(const std::string& which);

/// A message of the error that f throws, with notes; "no error".
std::string message_of(const std::function<void()>& f);

/// Models whose weights are zeros: what is merged into them is what a file adds.
struct LoraOverZeros : testing::Test {
  Graph graph;
  ParamTable params;
  LoraNames names{.denoisers = {"transformer"}};
  TemporaryFolder folder;

  LoraFile read(const std::string& path) const { return read_lora(path, LoraTargets(params, names)); }
  /// By input name, of the parameters that the file changes.
  HostArrays changes(const LoraFile& lora) const;
  /// The layers that both have pairs for are the same, with equal numbers.
  static void expect_equal(const LoraFile& a, const LoraFile& b);
};

}  // namespace md
