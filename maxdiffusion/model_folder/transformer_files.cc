// Single files of models whose denoiser is a transformer: denoiser, text encoders and autoencoder, as ComfyUI's
// checkpoints hold them. No tokenizer of theirs is installed, so that they are read with a folder. Sources: the names
// in ComfyUI's supported_models.py; the denoisers' original programs.
#include "maxdiffusion/model_folder/single_file.h"

namespace md {

std::vector<SingleFileLayout> transformer_layouts() {
  std::vector<SingleFileLayout> layouts;
  for (const auto& [name, tensor] : {std::pair{"FLUX.1", "vector_in.in_layer.weight"},
                                     {"FLUX.2", "double_stream_modulation_img.lin.weight"},
                                     {"Z-Image", "noise_refiner.0.attention.qkv.weight"},
                                     {"Qwen-Image", "transformer_blocks.0.img_mlp.net.2.weight"},
                                     {"Wan", "blocks.0.cross_attn.k.weight"}}) {
    const std::string denoiser = "model.diffusion_model.";
    layouts.push_back({.name = name,
                       .is_of = [tensor = denoiser + tensor](const HostArrays& t) { return t.contains(tensor); },
                       .texts = [name = name](const HostArrays&) -> std::map<std::string, std::string> {
                         throw Error(Code::invalid_config,
                                     fmt::format("the file is recognized as {}, whose files hold no tokenizer; "
                                                 "expected single_file_config",
                                                 name))
                             .note(
                                 "try: single_file_config=FOLDER, a model folder in diffusers' layout with its configs "
                                 "and tokenizers, or its name on the hub (owner/name)");
                       },
                       .unneeded = {"text_encoders."}});
  }
  return layouts;
}

}  // namespace md
