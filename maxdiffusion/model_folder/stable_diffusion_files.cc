// Single files of Stable Diffusion 1 and 2 and of SDXL: how they are recognized, and the configs of the published
// models. Sources: the models' folders on the Hugging Face hub (sizes, schedulers); diffusers 0.42,
// loaders/single_file_utils.py (tensors that distinguish them, 2.x's prediction type).
#include "maxdiffusion/base/log.h"

#include <nlohmann/json.hpp>
#include "maxdiffusion/model_folder/single_file.h"

namespace md {
namespace {

using nlohmann::json;
using Texts = std::map<std::string, std::string>;

constexpr const char *kFirstConvolution = "model.diffusion_model.input_blocks.0.0.weight",
                     *kOpenAi = "cond_stage_model.transformer.", *kOpenClip = "cond_stage_model.model.ln_final.weight",
                     *kSecondOfTwo = "conditioner.embedders.1.model.ln_final.weight",
                     *kOnlyOpenClip = "conditioner.embedders.0.model.ln_final.weight";

json unet(int64_t width_of_text, int64_t sample_size) {
  const std::string down = "CrossAttnDownBlock2D", up = "CrossAttnUpBlock2D";
  return {{"_class_name", "UNet2DConditionModel"},
          {"act_fn", "silu"},
          {"attention_head_dim", 8},
          {"block_out_channels", {320, 640, 1280, 1280}},
          {"center_input_sample", false},
          {"cross_attention_dim", width_of_text},
          {"down_block_types", {down, down, down, "DownBlock2D"}},
          {"downsample_padding", 1},
          {"flip_sin_to_cos", true},
          {"freq_shift", 0},
          {"in_channels", 4},
          {"layers_per_block", 2},
          {"mid_block_scale_factor", 1},
          {"norm_eps", 1e-5},
          {"norm_num_groups", 32},
          {"out_channels", 4},
          {"sample_size", sample_size},
          {"up_block_types", {"UpBlock2D", up, up, up}}};
}

json unet_2() {
  json c = unet(1024, 96);
  c["attention_head_dim"] = {5, 10, 20, 20};
  c["use_linear_projection"] = true;
  c["upcast_attention"] = true;
  return c;
}

json unet_xl() {
  json c = unet(2048, 128);
  c["attention_head_dim"] = {5, 10, 20};
  c["block_out_channels"] = {320, 640, 1280};
  c["down_block_types"] = {"DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"};
  c["up_block_types"] = {"CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"};
  c["transformer_layers_per_block"] = {1, 2, 10};
  c["use_linear_projection"] = true;
  c["addition_embed_type"] = "text_time";
  c["addition_time_embed_dim"] = 256;
  c["projection_class_embeddings_input_dim"] = 2816;
  return c;
}

json unet_refiner() {
  json c = unet_xl();
  c["attention_head_dim"] = {6, 12, 24, 24};
  c["block_out_channels"] = {384, 768, 1536, 1536};
  c["cross_attention_dim"] = 1280;
  c["down_block_types"] = {"DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"};
  c["up_block_types"] = {"UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"};
  c["transformer_layers_per_block"] = 4;
  c["projection_class_embeddings_input_dim"] = 2560;
  return c;
}

json vae(int64_t sample_size, double scale) {
  const std::string down = "DownEncoderBlock2D", up = "UpDecoderBlock2D";
  return {{"_class_name", "AutoencoderKL"},
          {"act_fn", "silu"},
          {"block_out_channels", {128, 256, 512, 512}},
          {"down_block_types", {down, down, down, down}},
          {"in_channels", 3},
          {"latent_channels", 4},
          {"layers_per_block", 2},
          {"norm_num_groups", 32},
          {"out_channels", 3},
          {"sample_size", sample_size},
          {"scaling_factor", scale},
          {"up_block_types", {up, up, up, up}}};
}

json text_encoder(const char* kind, const char* act, int64_t width, int64_t layers, int64_t projection) {
  return {{"architectures", {kind}},
          {"bos_token_id", 0},
          {"eos_token_id", 2},
          {"hidden_act", act},
          {"hidden_size", width},
          {"intermediate_size", 4 * width},
          {"layer_norm_eps", 1e-5},
          {"max_position_embeddings", 77},
          {"model_type", "clip_text_model"},
          {"num_attention_heads", width / 64},
          {"num_hidden_layers", layers},
          {"pad_token_id", 1},
          {"projection_dim", projection},
          {"vocab_size", 49408}};
}
json clip_l() { return text_encoder("CLIPTextModel", "quick_gelu", 768, 12, 768); }

/// The noise schedule of all these models, with the scheduler class `sampler`.
json scheduler(const char* sampler, const char* prediction) {
  return {{"_class_name", sampler},
          {"beta_end", 0.012},
          {"beta_schedule", "scaled_linear"},
          {"beta_start", 0.00085},
          {"clip_sample", false},
          {"num_train_timesteps", 1000},
          {"prediction_type", prediction},
          {"set_alpha_to_one", false},
          {"skip_prk_steps", true},
          {"steps_offset", 1},
          {"trained_betas", nullptr}};
}

json index(const char* pipeline, const char* sampler) {
  return {{"_class_name", pipeline},
          {"scheduler", {"diffusers", sampler}},
          {"text_encoder", {"transformers", "CLIPTextModel"}},
          {"tokenizer", {"transformers", "CLIPTokenizer"}},
          {"unet", {"diffusers", "UNet2DConditionModel"}},
          {"vae", {"diffusers", "AutoencoderKL"}}};
}

Texts texts_of(const std::map<std::string, json>& files) {
  Texts out;
  for (const auto& [path, value] : files) out[path] = value.dump(2) + "\n";
  return out;
}

/// The config of a UNet with 4 input channels, or with 9 for inpainting.
json with_channels(json config, const HostArrays& tensors) {
  const Dims& d = tensors.at(kFirstConvolution).dims();
  check(
      d.size() == 4 && (d[1] == 4 || d[1] == 9), Code::invalid_config,
      "'{}' is {}: a model with {} input channels (pix2pix, upscaling), which is not supported; expected 4, or 9 of an "
      "inpainting model",
      kFirstConvolution, to_string(tensors.at(kFirstConvolution).shape()), d.size() == 4 ? d[1] : 0);
  config["in_channels"] = d[1];
  return config;
}

const json kPadsWithZero = {{"pad_token", "!"}};  // as OpenCLIP does

Texts texts_1(const HostArrays& tensors) {
  json index_of_1 = index("StableDiffusionPipeline", "PNDMScheduler");
  return texts_of({{"model_index.json", index_of_1},
                   {"scheduler/scheduler_config.json", scheduler("PNDMScheduler", "epsilon")},
                   {"unet/config.json", with_channels(unet(768, 64), tensors)},
                   {"vae/config.json", vae(512, 0.18215)},
                   {"text_encoder/config.json", clip_l()}});
}

/// 2.x was published for 512 pixels with noise prediction, and for 768 with velocity prediction. Files do not contain
/// this, except for the number of training steps of the former.
Texts texts_2(const HostArrays& tensors) {
  constexpr double kStepsOfBase = 875000;
  const auto steps = tensors.find("global_step");
  const bool base =
      steps != tensors.end() && steps->second.shape().elements() == 1 && steps->second.to_doubles()[0] == kStepsOfBase;
  if (!base)
    log_info(
        "prediction_type: v_prediction, as in Stable Diffusion 2.x of 768 pixels; for a model of 512 pixels give "
        "prediction_type=epsilon");
  return texts_of({{"model_index.json", index("StableDiffusionPipeline", "DDIMScheduler")},
                   {"scheduler/scheduler_config.json", scheduler("DDIMScheduler", base ? "epsilon" : "v_prediction")},
                   {"unet/config.json", with_channels(unet_2(), tensors)},
                   {"vae/config.json", vae(768, 0.18215)},
                   {"tokenizer/tokenizer_config.json", kPadsWithZero},
                   {"text_encoder/config.json", text_encoder("CLIPTextModel", "gelu", 1024, 23, 512)}});
}

/// Of SDXL or, with the second text encoder alone, of its refiner.
std::map<std::string, json> files_xl(const HostArrays& tensors, const char* pipeline, json unet_config) {
  json index_of_xl = index(pipeline, "EulerDiscreteScheduler");
  index_of_xl["force_zeros_for_empty_prompt"] = true;
  index_of_xl["text_encoder_2"] = {"transformers", "CLIPTextModelWithProjection"};
  index_of_xl["tokenizer_2"] = {"transformers", "CLIPTokenizer"};
  json noise = scheduler("EulerDiscreteScheduler", "epsilon");
  noise["interpolation_type"] = "linear";
  noise["timestep_spacing"] = "leading";
  noise["use_karras_sigmas"] = false;
  return {{"model_index.json", index_of_xl},
          {"scheduler/scheduler_config.json", noise},
          {"unet/config.json", with_channels(std::move(unet_config), tensors)},
          {"vae/config.json", vae(1024, 0.13025)},
          {"tokenizer_2/tokenizer_config.json", kPadsWithZero},
          {"text_encoder_2/config.json", text_encoder("CLIPTextModelWithProjection", "gelu", 1280, 32, 1280)}};
}

Texts texts_xl(const HostArrays& tensors) {
  auto files = files_xl(tensors, "StableDiffusionXLPipeline", unet_xl());
  files["text_encoder/config.json"] = clip_l();
  return texts_of(files);
}

Texts texts_refiner(const HostArrays& tensors) {
  auto files = files_xl(tensors, "StableDiffusionXLImg2ImgPipeline", unet_refiner());
  json& index_of_refiner = files["model_index.json"];
  index_of_refiner["force_zeros_for_empty_prompt"] = false;
  index_of_refiner["requires_aesthetics_score"] = true;
  for (const char* name : {"text_encoder", "tokenizer"}) index_of_refiner.erase(name);
  return texts_of(files);
}

Texts texts_without_text_encoder(const HostArrays&) {
  throw Error(
      Code::invalid_config,
      "the file holds a UNet and no text encoder, which says of which version it is; expected single_file_config")
      .note(
          "try: single_file_config=FOLDER, a model folder in diffusers' layout with its configs, and "
          "clip_model_name_or_path=FILE; or that folder as pretrained_model_name_or_path, and this file as "
          "unet_checkpoint");
}

bool has_beginning(const HostArrays& tensors, const std::string& beginning) {
  const auto at = tensors.lower_bound(beginning);
  return at != tensors.end() && at->first.starts_with(beginning);
}

}  // namespace

std::vector<SingleFileLayout> stable_diffusion_layouts() {
  const std::vector<std::string> unneeded = {
      // Noise schedule and training counters.
      "betas", "alphas_cumprod", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "log_one_minus_alphas_cumprod",
      "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "posterior_", "lvlb_weights", "logvar",
      "scale_factor", "denoiser.sigmas", "denoiser.log_sigmas", "global_step", "model_ema.",
      "embedding_manager.",  // of textual inversion in the original program: embeddings of words that it does not name
      // Weights with which CLIP compares texts and images.
      "cond_stage_model.logit_scale", "cond_stage_model.text_projection", "cond_stage_model.transformer.logit_scale",
      "cond_stage_model.transformer.text_projection", "conditioner.embedders.0.logit_scale",
      "conditioner.embedders.0.text_projection", "conditioner.embedders.0.transformer.text_projection"};
  auto is_unet = [](const HostArrays& t) { return t.contains(kFirstConvolution); };
  return {
      {"SDXL", [=](const HostArrays& t) { return is_unet(t) && t.contains(kSecondOfTwo); }, texts_xl, unneeded},
      {"SDXL's refiner", [=](const HostArrays& t) { return is_unet(t) && t.contains(kOnlyOpenClip); }, texts_refiner,
       unneeded},
      {"Stable Diffusion 2.x", [=](const HostArrays& t) { return is_unet(t) && t.contains(kOpenClip); }, texts_2,
       unneeded},
      {"Stable Diffusion 1.x", [=](const HostArrays& t) { return is_unet(t) && has_beginning(t, kOpenAi); }, texts_1,
       unneeded},
      {"Stable Diffusion without text encoder", is_unet, texts_without_text_encoder, unneeded},
  };
}

}  // namespace md
