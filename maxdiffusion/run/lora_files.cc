#include "maxdiffusion/run/lora_files.h"

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checksums.h"

namespace md {

void write_lora_layout(const std::string& path, const LoraFile& lora, const ModelFolder& folder, const Family& family,
                       const std::string& layout, const std::map<std::string, std::string>& metadata) {
  const LoraNames names = lora_names(folder, family);
  if (layout == "diffusers") {
    const TemporaryFolder t;
    const std::string written = write_peft_lora(t.path(), lora, names);
    check(!written.empty(), Code::invalid_config,
          "layout is diffusers and '{}' holds {}; expected kohya or comfyui: diffusers reads lora, dora and lokr",
          lora.name, summary(lora));
    std::filesystem::copy_file(written, path);
  } else if (layout == "comfyui" || (layout.empty() && family.spec().lora.original_names)) {
    write_comfyui_lora(path, lora, names);
  } else {
    std::map<std::string, std::string> kohya_metadata = metadata;
    if (const std::string version = family.spec().lora.kohya_version; !version.empty()) {
      kohya_metadata["ss_base_model_version"] = version;
      kohya_metadata["ss_v2"] = version.starts_with("sd_v2") ? "True" : "False";
    }
    write_kohya_lora(path, lora, names, family.spec().text_components().size() == 2, kohya_metadata);
  }
}

}  // namespace md
