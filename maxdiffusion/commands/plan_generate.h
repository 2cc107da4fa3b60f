// What `generate` does, decided from the keys before anything is opened; and what runs that train sample.
#pragma once

#include <string>

#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/settings/requests.h"

namespace md {

struct GenerateOptions {
  bool with_control = false;  // the keys must name a ControlNet
  /// As the reference's programs do: one prompt gives a whole global batch, and files are numbered from 0 in output_dir
  /// whatever is there.
  bool as_reference = false;
};

struct GeneratePlan {
  std::string model, folder;  // what is loaded; where images go, which may be in a bucket
  PipelineOptions pipeline;
  SamplingRequest sampling;
  bool as_reference = false;  // see GenerateOptions
  bool profile = false;
  KeyRules rules;
};
/// Looks for the run whose checkpoint is sampled (run/find_run.h), and for the ControlNet's folder. Throws
/// invalid_config, io.
GeneratePlan plan_generate(const GenerateRequest& request, const GenerateOptions& how = {});

/// The options with the folder of the ControlNet that they name; none, where it is none and not `required`.
PipelineOptions with_control_folder(PipelineOptions options, bool required = false);
/// `request` with what the files hold. A ControlNet's image is read where `control`. Throws io naming a file;
/// invalid_config.
SampleRequest with_files(SampleRequest request, const SampleFiles& files, bool control = false);

}  // namespace md
