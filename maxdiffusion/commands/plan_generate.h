// The plan of `generate`, computed from the keys before any file is opened. Training runs that sample use it too.
#pragma once

#include <string>

#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/settings/requests.h"

namespace md {

struct GenerateOptions {
  bool with_control = false;  // the keys must name a ControlNet
  /// As in MaxDiffusion's programs: one prompt fills a whole global batch, and files in output_dir are numbered from 0
  /// even if it has files.
  bool as_reference = false;
};

struct GeneratePlan {
  std::string model, folder;  // what is loaded; the folder of the images, possibly in a bucket
  PipelineOptions pipeline;
  std::vector<GenerateItem> items;  // with the model's settings
  std::vector<XyAxis> axes = {};    // GenerateRequest::axes
  bool as_reference = false;        // see GenerateOptions
  bool profile = false;
  KeyRules rules;
};
/// Finds the run whose checkpoint is sampled (run/find_run.h), and the ControlNet's folder. Throws invalid_config, io.
GeneratePlan plan_generate(const GenerateRequest& request, const GenerateOptions& options = {});

/// Completes the options with the folders of the ControlNets that they name. If they name none, these are none, or
/// those in the folder `model` if they are `required`. Throws invalid_config if there are none then.
PipelineOptions with_control_folder(PipelineOptions options, bool required = false, const std::string& model = "");
/// `request` with the contents of the files. `control`: also reads the ControlNets' images, `adapters`: those of image
/// adapters. Throws invalid_config, and io naming a file.
SampleRequest with_files(SampleRequest request, const SampleFiles& files, bool control = false, bool adapters = false);

}  // namespace md
