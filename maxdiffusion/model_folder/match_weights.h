// Compares the parameters of a component's config with the headers of its weights, before the model is built.
#pragma once

#include <string>

#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/model_folder/model_folder.h"
#include "maxdiffusion/nn/param.h"

namespace md {

/// The parameters that a component's config needs from `file`, which was opened at `path`. Tracing stops when there are
/// more parameters than the file can hold, so that a config of any size costs no more than its weights. Throws io if a
/// parameter is missing, unused or of another shape, as open_weights does; the error names the config's members that
/// cause it. `options`: as in open_weights, without the names of other programs.
ParamTable match_weights(const std::string& name, const Component& component, const SafetensorsReader& file,
                         const std::string& path, LoadOptions options = {});

}  // namespace md
