#include "maxdiffusion/train/companions.h"

#include "maxdiffusion/checkpoint/weights.h"

namespace md {

HostArrays of_component(const ParamTable& params, const std::string& component, const HostArrays& all) {
  HostArrays v;
  for (const Param& p : params.params())
    if (p.model == component) v[p.input] = all.at(p.input);
  return v;
}

bool Companions::fresh(const std::string& component) const {
  const ModelKeys& m = config_.model;
  return component == "unet" ? m.train_new_unet : component == "vae" ? m.train_new_vae : m.random_text_encoder;
}

WeightsOf Companions::weights() {
  return [this](const ParamTable& p, const std::string& component) { return open(p, component)(); };
}

std::function<HostArrays()> Companions::open(const ParamTable& params, const std::string& component) {
  if (component == "vae") return [this, &params] { return of_component(params, "vae", vae()); };
  const std::string& other = config_.model.unet_checkpoint;
  if (component == "unet" && !other.empty() && !fresh("unet"))
    return [&params, component, other] { return ModelFolder::values_at(params, component, unet_folder(other)); };
  return folder_.open_values(params, component, fresh(component), seed_);
}

const HostArrays& Companions::vae() {
  if (vae_.empty()) vae_ = folder_.values(vae_params(folder_, DType::f32), "vae", fresh("vae"), seed_);
  return vae_;
}

TextEncoder& Companions::text() {
  if (!text_)
    text_ = std::make_unique<TextEncoder>(devices_, folder_, batch(), weights(), scope_options(config_.model),
                                          config_.compile);
  return *text_;
}

PictureCoder& Companions::coder() {
  if (!coder_)
    coder_ = std::make_unique<PictureCoder>(devices_, folder_.vae, vae(), batch(), scope_options(config_.model),
                                            config_.compile);
  return *coder_;
}

void Companions::complete(CheckpointContent& content) {
  for (const auto& [path, text] : folder_.files) content.files[path] = text;
  folder_.add_tokenizers(content.files);
  for (const char* component : {"unet", "vae", "text_encoder", "text_encoder_2"}) {
    if (content.weights.contains(component) || !folder_.files.contains(std::string(component) + "/config.json"))
      continue;
    if (!fresh(component)) {
      const std::string& other = config_.model.unet_checkpoint;
      const std::string from =
          component == std::string("unet") && !other.empty() ? unet_folder(other) : folder_.path + "/" + component;
      for (const std::string& file : weight_files(from))
        content.linked[std::string(component) + file.substr(file.rfind('/'))] = file;
    } else if (component == std::string("vae")) {
      content.weights["vae"] = as_pieces(published(vae_params(folder_, DType::f32), "vae", vae()));
    } else {
      content.weights[component] = as_pieces(text().weights().at(component));
    }
  }
}

}  // namespace md
