#include "maxdiffusion/server/fields.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/pipelines/sample_request.h"
#include "maxdiffusion/server/service.h"

namespace md {
namespace {

using nlohmann::json;
using List = std::vector<ServedField>;
using enum ServedField::Fate;

constexpr const char* kNoExtra = "this server has no such part of the web UI";
constexpr const char* kOwnSampler = "samplers have the settings of their names";
constexpr const char* kSecondPass = "the second pass has the settings of the first";
constexpr const char* kNoImageChoice = "images are PNG files, and the server does not store them under names";

List obeyed_fields(const std::vector<std::string>& names, const std::string& needs = "") {
  List out;
  for (const std::string& name : names) out.push_back({.name = name, .needs = needs});
  return out;
}

List operator+(List a, const List& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// txt2img and img2img. Source: the web UI's page /docs, and Forge's.
List a1111_fields() {
  return obeyed_fields({"prompt", "negative_prompt", "seed", "steps", "cfg_scale", "distilled_cfg_scale", "width",
                        "height", "batch_size", "n_iter", "sampler_name", "sampler_index", "scheduler", "send_images",
                        "denoising_strength", "override_settings"}) +
         List{{"styles", ignored, "there are no styles"},
              {"subseed", ignored, "noise is of one seed", "subseed_strength"},
              {"subseed_strength", ignored, "noise is of one seed"},
              {"seed_resize_from_h", ignored, "noise has the size of the sample", "", {-1, 0}},
              {"seed_resize_from_w", ignored, "noise has the size of the sample", "", {-1, 0}},
              {"restore_faces", ignored, kNoExtra},
              {"tiling", ignored, "samples do not repeat at their sides"},
              {"eta", ignored, kOwnSampler, "", {1}},
              {"s_min_uncond", ignored, kOwnSampler},
              {"s_churn", ignored, kOwnSampler},
              {"s_tmax", ignored, kOwnSampler, "s_churn"},
              {"s_tmin", ignored, kOwnSampler, "s_churn"},
              {"s_noise", ignored, kOwnSampler, "", {1}},
              {"refiner_checkpoint", ignored, "the server's key refiner names the refiner", "", {"", "None"}},
              {"refiner_switch_at", ignored, "denoising_end of the server says it", "refiner_checkpoint", {0}},
              {"disable_extra_networks", ignored, "tags in the prompt are read"},
              {"script_name", ignored, kNoExtra, "", {"", "None"}},
              {"script_args", ignored, kNoExtra, "script_name"},
              {"alwayson_scripts", ignored, kNoExtra},
              {"comments", ignored, "images have the texts of this program"},
              {"infotext", ignored, "fields have to be given one by one"},
              {"force_task_id", ignored, "requests have no names"},
              {"save_images", ignored, "the server stores no images"},
              // Nothing is stored, and options of a request are of that request, whatever these fields are.
              {"do_not_save_samples", ignored, "", "", {true, false}},
              {"do_not_save_grid", ignored, "", "", {true, false}},
              {"override_settings_restore_afterwards",
               ignored,
               "settings of a request are of that request",
               "",
               {true}}};
}

List txt2img_fields() {
  return a1111_fields() + obeyed_fields({"enable_hr"}) + obeyed_fields({"hr_scale", "hr_upscaler"}, "enable_hr") +
         List{{"hr_resize_x", ignored, "hr_scale enlarges", "enable_hr"},
              {"hr_resize_y", ignored, "hr_scale enlarges", "enable_hr"},
              {"hr_second_pass_steps", ignored, kSecondPass, "enable_hr"},
              {"hr_checkpoint_name", ignored, kSecondPass, "enable_hr", {"", "Use same checkpoint"}},
              {"hr_sampler_name", ignored, kSecondPass, "enable_hr", {"", "Use same sampler"}},
              {"hr_scheduler", ignored, kSecondPass, "enable_hr", {"", "Use same scheduler"}},
              {"hr_prompt", ignored, kSecondPass, "enable_hr"},
              {"hr_negative_prompt", ignored, kSecondPass, "enable_hr"},
              {"hr_cfg", ignored, kSecondPass, "enable_hr"},
              {"hr_distilled_cfg", ignored, kSecondPass, "enable_hr"},
              {"hr_additional_modules",
               ignored,
               kSecondPass,
               "enable_hr",
               {json::array({"Use same choices"}), json::array()}},
              {"firstphase_width", ignored, "width is the width of the first pass", "enable_hr"},
              {"firstphase_height", ignored, "height is the height of the first pass", "enable_hr"},
              {"firstpass_image", ignored, "the first pass is sampled", "enable_hr"}};
}

List img2img_fields() {
  return a1111_fields() + obeyed_fields({"init_images", "mask"}) +
         obeyed_fields({"mask_blur", "mask_blur_x", "mask_blur_y", "inpaint_full_res", "inpaint_full_res_padding",
                        "inpainting_mask_invert"},
                       "mask") +
         List{{"inpainting_fill", ignored, "masked parts begin with the image itself", "mask", {1}},
              {"mask_round", ignored, "masks are not rounded beyond the size of latents", "mask", {true}},
              {"latent_mask", ignored, "mask is read"},
              {"resize_mode", ignored, "images are resized to the size of the sample"},
              {"image_cfg_scale", ignored, "no model of edits reads it", "", {0, 1.5}},
              {"initial_noise_multiplier", ignored, "noise has the sampler's strength", "", {1}},
              {"include_init_images", ignored, "answers do not repeat images"}};
}

List openai_fields() {
  return obeyed_fields({"prompt", "model", "n", "size", "seed", "response_format"}) +
         List{{"output_format", ignored, "images are PNG files", "", {"png"}},
              {"output_compression", ignored, "images are PNG files", "", {100}},
              {"stream", refused, "expected false: answers are whole"},
              {"partial_images", ignored, "answers are whole"},
              {"user", ignored, "no difference is made between users"},
              {"moderation", ignored, "nothing is moderated", "", {"auto", "low"}},
              {"background", ignored, "images are opaque", "", {"auto", "opaque"}},
              {"quality", ignored, "num_inference_steps says it", "", {"auto"}},
              {"style", ignored, "the prompt says it"}} +
         obeyed_fields(request_keys());
}

std::map<std::string, List> lists() {
  std::map<std::string, List> out = {
      {"/v1/images/generations", openai_fields()},
      {"/v1/images/edits", openai_fields() + obeyed_fields({"image", "images", "mask"}) +
                               List{{"input_fidelity", ignored, "strength says it"}}},
      {"/sdapi/v1/txt2img", txt2img_fields()},
      {"/sdapi/v1/img2img", img2img_fields()},
      {"/sdapi/v1/options", obeyed_fields({"sd_model_checkpoint", "CLIP_stop_at_last_layers"}) +
                                List{{"samples_format", ignored, kNoImageChoice, "", {"png"}}}},
      {"/sdapi/v1/png-info", obeyed_fields({"image"})},
      {"/api/generate", obeyed_fields({"model", "images", "image", "mask"}) + obeyed_fields(request_keys())}};
  out["override_settings"] = out["/sdapi/v1/options"];
  for (auto& [endpoint, list] : out) {  // a key of sampling may have the name of a field that the endpoint knows
    List once;
    for (ServedField& f : list)
      if (std::ranges::find(once, f.name, &ServedField::name) == once.end()) once.push_back(std::move(f));
    list = std::move(once);
  }
  return out;
}

bool is_nothing(const json& v) {
  if (v.is_string()) return v == "" || v == "false" || v == "False";
  return v.is_null() || v == false || v == 0 || ((v.is_array() || v.is_object()) && v.empty());
}

bool is_off(const ServedField& f, const json& v) {
  return v.is_null() || (f.off.is_null() ? is_nothing(v) : std::ranges::find(f.off, v) != f.off.end());
}

}  // namespace

const std::vector<std::string>& request_keys() {
  static const std::vector<std::string> names = [] {
    SampleRequest r;
    KeyList keys;
    keys.add(static_cast<SampleKeys&>(r));
    keys.add(r.scheduler);
    std::vector<std::string> out;
    // Fields of scheduler_config.json have unlimited sizes; the prediction type is the model's, not the client's
    // choice.
    for (const ConfigKey& key : keys.keys())
      if (key.name != "diffusion_scheduler_config" && key.name != "prediction_type") out.push_back(key.name);
    return out;
  }();
  return names;
}

const std::vector<ServedField>& served_fields(const std::string& endpoint) {
  static const std::map<std::string, List> all = lists();
  return all.at(endpoint);
}

void sort_fields(Fields& fields, const std::string& endpoint, const std::string& prefix) {
  const std::vector<ServedField>& list = served_fields(endpoint);
  const std::map<std::string, json> body = fields;
  std::vector<std::string> unknown;
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const auto& [name, value] : body) {
    const auto field = std::ranges::find(list, name, &ServedField::name);
    if (field == list.end()) {
      fields.erase(name);
      if (!is_nothing(value)) unknown.push_back(name.substr(0, 60));
      continue;
    }
    const auto needed = body.find(field->needs);
    if (!field->needs.empty() && (needed == body.end() || is_nothing(needed->second))) {
      fields.erase(name);
      continue;
    }
    if (field->fate == obeyed) continue;
    fields.erase(name);
    if (is_off(*field, value)) continue;
    if (field->fate == refused)
      throw Refusal(400, fmt::format("{} is {}; {}", name, shown_value(value), field->reason));
    by_reason[field->reason].push_back(name);
  }
  if (unknown.size() > 40) unknown.resize(40);
  if (!unknown.empty())
    fields.warnings.push_back(fmt::format("{}{} ignored: {}", prefix, unknown.size() == 1 ? "a field is" : "fields are",
                                          fmt::join(unknown, ", ")));
  for (const auto& [reason, names] : by_reason)
    fields.warnings.push_back(
        fmt::format("{}{} {} ignored: {}", prefix, fmt::join(names, ", "), names.size() == 1 ? "is" : "are", reason));
}

}  // namespace md
