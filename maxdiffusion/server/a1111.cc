// The parts of the API of AUTOMATIC1111's web UI that its clients need to generate: /sdapi/v1/txt2img, img2img,
// options, samplers, schedulers, sd-models, loras, progress, interrupt, skip, png-info. Fields have the web UI's names;
// missing fields have the model's defaults, not the web UI's. As in the web UI, image i of a request has the first
// image's seed plus i. Source: its page /docs.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <set>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/schedulers/sampler_names.h"
#include "maxdiffusion/server/samplers.h"
#include "maxdiffusion/server/service.h"
#include "maxdiffusion/settings/foreign_image.h"

namespace md {
namespace {

using nlohmann::json;

json a1111_error(int status, const std::string& message) {
  const char* name = status == 404 ? "Not Found" : status >= 500 ? "Internal Server Error" : "HTTPException";
  return {{"error", name}, {"detail", message}, {"body", ""}, {"errors", message}};
}

/// A message about keys in the words of this interface, outside of quotes.
std::string in_field_names(const std::string& text) {
  static const std::map<std::string, std::string> kFields = {{"num_inference_steps", "steps"},
                                                             {"guidance_scale", "cfg_scale"},
                                                             {"true_cfg_scale", "cfg_scale"},
                                                             {"strength", "denoising_strength"},
                                                             {"hires_strength", "denoising_strength"},
                                                             {"hires_scale", "hr_scale"},
                                                             {"hires_upscaler", "hr_upscaler"},
                                                             {"padding_mask_crop", "inpaint_full_res_padding"},
                                                             {"sigma_schedule", "scheduler"},
                                                             {"scheduler", "sampler_name"},
                                                             {"sample_seed", "seed"}};
  const auto of_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  std::string out;
  bool quoted = false;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && of_word(text[end])) ++end;
    if (end == at) {
      quoted ^= text[at] == '"';
      out += text[at++];
      continue;
    }
    const std::string word = text.substr(at, end - at);
    const auto field = kFields.find(word);
    out += quoted || field == kFields.end() ? word : field->second;
    at = end;
  }
  return out;
}

/// Sets the sampler and the spacing of its noise levels.
void set_sampler(Service& service, const std::string& model, Fields& fields, SampleRequest& r) {
  const std::string index = take<std::string>(fields, "sampler_index", "");
  const std::string name = take<std::string>(fields, "sampler_name", index);
  WebUiSampler sampler;
  if (!name.empty() && name != "Automatic") {
    sampler = web_ui_sampler(name);
    r.scheduler.scheduler = sampler.name;
    if (!sampler.schedule.empty()) r.scheduler.sigma_schedule = sampler.schedule;
    if (r.scheduler.scheduler.empty())
      throw Refusal(404, fmt::format("sampler_name is '{}'; GET /sdapi/v1/samplers lists those that are known",
                                     name.substr(0, 60)));
  }
  const std::string schedule = take<std::string>(fields, "scheduler", "");
  if (schedule.empty() || !sampler.schedule.empty()) return;  // as in the web UI, that of the sampler's name is used
  if (schedule == "Automatic" || schedule == "automatic") {
    // The web UI's samplers have no schedule of their own for flow matching.
    r.scheduler.sigma_schedule = service.queue.is_flow_matching(model) ? "" : automatic_schedule(r.scheduler.scheduler);
    return;
  }
  const std::string named = schedule_named(schedule, service.queue.family(model).spec().chunk_widths.size() > 1);
  if (!named.empty() && steps_over_timesteps(r.scheduler.scheduler)) {  // the web UI, too, does not use it there
    if (named != "training")
      fields.warnings.push_back(fmt::format("scheduler is ignored: {} steps over timesteps",
                                            name.empty() ? r.scheduler.scheduler : name.substr(0, 60)));
    return;
  }
  r.scheduler.sigma_schedule = named;
  if (r.scheduler.sigma_schedule.empty())
    throw Refusal(404, fmt::format("scheduler is '{}'; GET /sdapi/v1/schedulers lists those that are known",
                                   schedule.substr(0, 60)));
}

/// Sets both scales of guidance. Forge's distilled_cfg_scale is the input of a guidance-distilled model; cfg_scale next
/// to it is classifier-free guidance, for which that model has true_cfg_scale.
void set_guidance(const Family& family, Fields& fields, SampleRequest& r) {
  const bool distilled = family.spec().embedded_guidance;
  const auto found = fields.find("distilled_cfg_scale");
  if (found != fields.end() && distilled && !found->second.is_null()) {
    r.guidance_scale = take<double>(fields, "distilled_cfg_scale", r.guidance_scale);
    const double cfg = take<double>(fields, "cfg_scale", r.true_cfg_scale);
    if (family.spec().true_guidance)
      r.true_cfg_scale = cfg;
    else if (cfg != 1)
      fields.warnings.emplace_back("cfg_scale is ignored: this model has no classifier-free guidance");
    return;
  }
  if (found != fields.end()) {
    if (!found->second.is_null() && found->second != 3.5)  // Forge's default
      fields.warnings.emplace_back("distilled_cfg_scale is ignored: this model was not distilled with guidance");
    fields.erase(found);
  }
  r.guidance_scale = take(fields, "cfg_scale", r.guidance_scale);
}

/// The served model that a title of the web UI names: "sdxl.safetensors [31e35c80fc]" is sdxl.
std::string model_of_title(const Service& service, std::string title) {
  const std::vector<std::string> names = service.queue.models();
  const auto known = [&] { return std::ranges::find(names, title) != names.end(); };
  const std::string requested = title;
  if (const size_t hash = title.rfind(" ["); !known() && hash != title.npos && title.ends_with(']')) title.resize(hash);
  for (const char* ending : {".safetensors", ".ckpt", ".gguf"})
    if (!known() && title.ends_with(ending)) title.resize(title.size() - std::string_view(ending).size());
  return known() ? title : requested;
}

struct Images {
  std::string model;
  SampleRequest request;
  int64_t batch_size = 1, count = 1;  // count: over all batches
  bool sends = true;
  json parameters = json::object();  // all fields but images, for the answer
};

/// clip_skip for the web UI's CLIP_stop_at_last_layers, where 1 is the last layer.
int64_t skipped(int64_t stop) {
  if (stop < 1 || stop > 12) throw Refusal(400, fmt::format("CLIP_stop_at_last_layers is {}; expected 1 to 12", stop));
  return stop - 1;
}

/// Reads the fields that txt2img and img2img share.
Images images_of(Service& service, Fields& fields) {
  Images out;
  for (const auto& [name, value] : fields)
    if (name != "init_images" && name != "mask") out.parameters[name] = value;
  Fields overrides;
  if (const auto found = fields.find("override_settings"); found != fields.end()) {
    if (found->second.is_object())
      for (const auto& [name, value] : found->second.items()) overrides[name] = value;
    else if (!found->second.is_null())
      throw Refusal(400, fmt::format("override_settings is {}; expected an object", shown_value(found->second)));
    fields.erase(found);
  }
  sort_fields(overrides, "override_settings", "override_settings: ");
  fields.warnings.insert(fields.warnings.end(), overrides.warnings.begin(), overrides.warnings.end());
  {
    const std::lock_guard lock(service.mutex);
    out.model = model_of_title(service, take<std::string>(overrides, "sd_model_checkpoint", service.default_model));
    out.request = service.queue.model(out.model).defaults;
    if (service.default_clip_skip > 0) out.request.clip_skip = service.default_clip_skip;
  }
  SampleRequest& r = out.request;
  const Family& family = service.queue.family(out.model);
  if (const auto stop = take<int64_t>(overrides, "CLIP_stop_at_last_layers", 0); stop != 0) r.clip_skip = skipped(stop);
  r.prompt = {take<std::string>(fields, "prompt", "")};
  if (const std::string negative = take<std::string>(fields, "negative_prompt", ""); !negative.empty())
    r.negative_prompt = {negative};
  if (!family.spec().chunk_widths.empty()) r.prompt_syntax = "a1111";
  r.sample_seed = take_seed(fields, "seed");
  r.num_inference_steps = take(fields, "steps", r.num_inference_steps);
  set_guidance(family, fields, r);
  if (const auto v = take<int64_t>(fields, "width", 0); v != 0) r.width = v;
  if (const auto v = take<int64_t>(fields, "height", 0); v != 0) r.height = v;
  out.batch_size = take<int64_t>(fields, "batch_size", 1);
  const auto batches = take<int64_t>(fields, "n_iter", 1);
  if (std::min(out.batch_size, batches) < 1 || std::max(out.batch_size, batches) > service.keys.max_images)
    throw Refusal(400, fmt::format("batch_size is {} and n_iter {}; expected 1 to {} each, the server's max_images",
                                   out.batch_size, batches, service.keys.max_images));
  out.count = out.batch_size * batches;
  out.sends = take(fields, "send_images", true);
  set_sampler(service, out.model, fields, r);
  return out;
}

HttpReply answer(Service& service, const HttpCall& call, const Images& its, const Fields& fields) {
  const std::string negative = its.request.negative_prompt.empty() ? "" : its.request.negative_prompt[0];
  std::set<std::string> set_keys;
  if (!negative.empty()) set_keys.insert("negative_prompt");
  const std::vector<JobQueue::Ticket> jobs = submit_each(service, its.model, its.request, set_keys, its.count);
  json images = json::array(), texts = json::array(), seeds = json::array(), prompts = json::array(),
       negatives = json::array();
  int64_t width = 0, height = 0;
  for (const GeneratedImage& image : service.await(jobs, call)) {
    if (its.sends) images.push_back(to_base64(Service::png_of(image)));
    texts.push_back(image.parameters);
    seeds.push_back(image.seed);
    prompts.push_back(its.request.prompt[0]);
    negatives.push_back(negative);
    height = image.rgb.dims()[0], width = image.rgb.dims()[1];
  }
  std::vector<std::string> warnings = warnings_of(service, fields, jobs);
  const size_t of_fields = std::min(fields.warnings.size(), warnings.size());
  std::transform(warnings.begin() + static_cast<std::ptrdiff_t>(of_fields), warnings.end(),
                 warnings.begin() + static_cast<std::ptrdiff_t>(of_fields), in_field_names);
  const json info = {{"prompt", its.request.prompt[0]},
                     {"all_prompts", prompts},
                     {"negative_prompt", negative},
                     {"all_negative_prompts", negatives},
                     {"seed", seeds[0]},
                     {"all_seeds", seeds},
                     {"width", width},
                     {"height", height},
                     {"sampler_name", its.request.scheduler.scheduler},
                     {"cfg_scale", its.request.guidance_scale},
                     {"steps", its.request.num_inference_steps},
                     {"batch_size", its.batch_size},
                     {"sd_model_name", its.model},
                     {"clip_skip", its.request.clip_skip + 1},
                     {"infotexts", texts},
                     {"warnings", warnings}};
  return json_reply({{"images", images}, {"parameters", its.parameters}, {"info", dump_json(info)}});
}

/// The name of a model's upscaler; empty: it has none.
std::string upscaler_of(const ServedModel& model) { return std::filesystem::path(model.options.added.upscaler).stem(); }

/// The value of hires_upscaler for one of the web UI's names: "Latent", "Lanczos", "None", or that of the served
/// upscaler's file. Throws Refusal for others.
std::string hires_upscaler(const ServedModel& model, const std::string& name) {
  if (name.empty()) return "";
  if (name == "Latent") return "latent";
  if (name == "Lanczos" || name == "None") return "lanczos";  // as the web UI resizes without an upscaler
  const std::string file = upscaler_of(model);
  if (!file.empty() && name == file) return "upscaler";
  throw Refusal(400, fmt::format("hr_upscaler is '{}'; expected Latent, Lanczos{}", name.substr(0, 60),
                                 file.empty() ? " or None, or a server with upscaler=FILE" : ", None or " + file));
}

HttpReply txt2img(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  Images its = images_of(service, fields);
  SampleRequest& r = its.request;
  const auto strength = take<double>(fields, "denoising_strength", r.hires_strength);
  if (take(fields, "enable_hr", false)) {
    r.hires_scale = take<double>(fields, "hr_scale", 2);
    r.hires_strength = strength;
    if (const std::string by = take<std::string>(fields, "hr_upscaler", ""); !by.empty())
      r.hires_upscaler = hires_upscaler(service.queue.model(its.model), by);
  }
  return answer(service, call, its, fields);
}

/// mask_blur, which counts first, or mask_blur_x and mask_blur_y.
double mask_blur(Fields& fields) {
  const auto x = take<double>(fields, "mask_blur_x", 4), y = take<double>(fields, "mask_blur_y", x);
  const auto found = fields.find("mask_blur");
  if (found != fields.end() && !found->second.is_null()) return take<double>(fields, "mask_blur", 4);
  fields.erase("mask_blur");
  if (x != y) throw Refusal(400, fmt::format("mask_blur_x is {} and mask_blur_y {}; expected equal ones", x, y));
  return x;
}

HttpReply img2img(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  Images its = images_of(service, fields);
  SampleRequest& r = its.request;
  const auto found = fields.find("init_images");
  if (found == fields.end() || !found->second.is_array() || found->second.empty())
    throw Refusal(404, "init_images has no image; expected a list of one, as base64");
  if (found->second.size() > 1) fields.warnings.emplace_back("init_images: only the first image is used");
  if (!found->second[0].is_string())
    throw Refusal(400, "init_images holds no text; expected base64 of an image's file");
  r.images = {image_of_bytes(service, "init_images", bytes_of_text("init_images", found->second[0]))};
  fields.erase(found);
  r.strength = take<double>(fields, "denoising_strength", 0.75);
  if (const std::string mask = take<std::string>(fields, "mask", ""); !mask.empty()) {
    r.mask = image_of_bytes(service, "mask", bytes_of_text("mask", mask));
    if (take<int64_t>(fields, "inpainting_mask_invert", 0) != 0)
      std::ranges::transform(r.mask.view<uint8_t>(), r.mask.mutable_view<uint8_t>().begin(),
                             [](uint8_t v) { return static_cast<uint8_t>(255 - v); });
    r.mask_blur = mask_blur(fields);
    const auto padding = take<int64_t>(fields, "inpaint_full_res_padding", 32);
    if (take(fields, "inpaint_full_res", false)) r.padding_mask_crop = padding;
  }
  return answer(service, call, its, fields);
}

json options(Service& service) {
  const std::lock_guard lock(service.mutex);
  return {{"sd_model_checkpoint", service.default_model},
          {"CLIP_stop_at_last_layers", service.default_clip_skip + 1},
          {"samples_format", "png"}};
}

HttpReply set_options(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  const std::string model = model_of_title(service, take<std::string>(fields, "sd_model_checkpoint", ""));
  const auto stop = take<int64_t>(fields, "CLIP_stop_at_last_layers", 0);
  service.queue.model(model);  // throws for an unknown model
  const int64_t clip_skip = stop == 0 ? 0 : skipped(stop);
  const std::lock_guard lock(service.mutex);
  if (!model.empty()) service.default_model = model;
  if (stop != 0) service.default_clip_skip = clip_skip;
  return json_reply(fields.warnings.empty() ? json() : json({{"warnings", fields.warnings}}));
}

json progress(Service& service, const HttpCall& call) {
  const JobStatus s = service.queue.running();
  const bool runs = s.state == JobState::running;
  const auto skip = call.query.find("skip_current_image");
  const bool shows = runs && s.preview && (skip == call.query.end() || skip->second != "true");
  return {{"progress", s.steps > 0 ? static_cast<double>(s.step) / static_cast<double>(s.steps) : 0.0},
          {"eta_relative", 0.0},
          {"state",
           {{"skipped", false},
            {"interrupted", false},
            {"job", runs ? "generate" : ""},
            {"job_count", service.queue.waiting() + (runs ? 1 : 0)},
            {"job_no", 0},
            {"sampling_step", s.step},
            {"sampling_steps", s.steps}}},
          {"current_image", shows ? json(to_base64(*s.preview)) : json()},
          {"textinfo", nullptr}};
}

HttpReply png_info(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  const std::string bytes = bytes_of_text("image", take<std::string>(fields, "image", ""));
  image_of_bytes(service, "image", bytes);  // throws for an invalid image
  PngTexts texts;
  if (bytes.starts_with("\x89PNG"))
    texts = png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "image");
  json items = json::object();
  for (const auto& [name, text] : texts)
    if (name == "parameters") items[name] = text;
  const std::string info = items.value("parameters", std::string());
  json parameters = json::object();
  if (!info.empty())
    for (const auto& [name, value] : fields_of_web_ui(info)) parameters[name] = value;
  return json_reply({{"info", info}, {"items", items}, {"parameters", parameters}});
}

json list(const std::vector<std::string>& names, json (*row)(const std::string&)) {
  json out = json::array();
  for (const std::string& name : names) out.push_back(row(name));
  return out;
}

HttpReply reply_to(Service& service, const HttpCall& call) {
  const std::string start = "/sdapi/v1/", name = call.path.starts_with(start) ? call.path.substr(start.size()) : "";
  const bool gets = call.method == "GET", posts = call.method == "POST";
  if (posts && name == "txt2img") return txt2img(service, call);
  if (posts && name == "img2img") return img2img(service, call);
  if (gets && name == "options") return json_reply(options(service));
  if (posts && name == "options") return set_options(service, call);
  if (gets && name == "progress") return json_reply(progress(service, call));
  if (posts && (name == "interrupt" || name == "skip")) {
    service.queue.interrupt(false);
    return json_reply(json::object());
  }
  if (posts && name == "png-info") return png_info(service, call);
  if (gets && name == "samplers")
    return json_reply(list(sampler_titles(), [](const std::string& title) {
      return json{{"name", title}, {"aliases", {sampler_name(title)}}, {"options", json::object()}};
    }));
  if (gets && name == "schedulers") {
    json out = {{{"name", "automatic"},
                 {"label", "Automatic"},
                 {"aliases", nullptr},
                 {"default_rho", -1.0},
                 {"need_inner_model", false}}};
    for (const SigmaScheduleTitle& s : sigma_schedule_titles())
      out.push_back({{"name", s.name},
                     {"label", s.label},
                     {"aliases", nullptr},
                     {"default_rho", -1.0},
                     {"need_inner_model", false}});
    return json_reply(out);
  }
  if (gets && name == "sd-models")
    return json_reply(list(service.queue.models(), [](const std::string& model) {
      return json{{"title", model},    {"model_name", model}, {"hash", nullptr},
                  {"sha256", nullptr}, {"filename", model},   {"config", nullptr}};
    }));
  if (gets && name == "upscalers") {
    std::vector<std::string> names = {"None", "Lanczos"};
    for (const std::string& model : service.queue.models())
      if (const std::string file = upscaler_of(service.queue.model(model));
          !file.empty() && std::ranges::find(names, file) == names.end())
        names.push_back(file);
    return json_reply(list(names, [](const std::string& upscaler) {
      return json{{"name", upscaler}, {"model_name", nullptr}, {"model_path", nullptr}, {"model_url", nullptr}};
    }));
  }
  if (gets && name == "latent-upscale-modes") return json_reply(json::array({{{"name", "Latent"}}}));
  if (gets && name == "loras")
    return json_reply(list(service.queue.loras(""), [](const std::string& lora) {
      return json{{"name", lora}, {"alias", lora}, {"path", lora}, {"metadata", json::object()}};
    }));
  throw Refusal(404,
                fmt::format("{} {} is not served; docs/server.md has the list", call.method, call.path.substr(0, 100)));
}

HttpReply a1111_reply(Service& service, const HttpCall& call) try {
  return reply_to(service, call);
} catch (const Refusal&) {
  throw;  // it names fields
} catch (const Unavailable&) {
  throw;
} catch (const Error& e) {
  if (e.code() != Code::invalid_config) throw;
  Error named(e.code(), in_field_names(e.message()));
  for (const std::string& note : e.notes()) named.note(in_field_names(note));
  throw named;
}

}  // namespace

Interface a1111_interface() {
  return {[](const std::string& path) { return path.starts_with("/sdapi/"); }, a1111_reply, a1111_error};
}

}  // namespace md
