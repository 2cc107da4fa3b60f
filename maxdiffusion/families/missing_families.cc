#include "maxdiffusion/families/missing_families.h"

namespace md {

const std::vector<MissingFamily>& missing_families() {
  static const std::vector<MissingFamily> families = {
      {"LTX-2", "model_name", "ltx2"},
      {"LTX-Video", "first_pass"},
      {"LTX-Video", "pretrained_model_name_or_path", "Lightricks/LTX-Video"},
      {"FLUX.2-klein", "flux_name", "flux2klein"},
      {"Z-Image", "model_name", "z_image"},
      {"Wan Animate", "mode", "animate"},
  };
  return families;
}

const char* const kFamiliesHere = "Stable Diffusion 1 and 2, SDXL, FLUX.1, Wan 2.1 and 2.2";

}  // namespace md
