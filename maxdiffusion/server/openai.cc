// OpenAI's images API: /v1/images/generations, /v1/images/edits, /v1/models. Further fields are sampling keys with
// their names. Source: OpenAI's API reference, "Images" and "Models".
#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/server/service.h"

namespace md {
namespace {

using nlohmann::json;

json openai_error(int status, const std::string& message) {
  const char* type = status == 401   ? "authentication_error"
                     : status == 403 ? "permission_error"
                     : status == 429 ? "rate_limit_error"
                     : status >= 500 ? "server_error"
                                     : "invalid_request_error";
  return {{"error", {{"message", message}, {"type", type}, {"param", nullptr}, {"code", nullptr}}}};
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

json model_of(const std::string& name) {
  return {{"id", name}, {"object", "model"}, {"created", 0}, {"owned_by", "maxdiffusion"}};
}

/// Parses "512x768" into width and height; "auto" or empty: none.
void set_size(const std::string& size, SampleRequest& r) {
  if (size.empty() || size == "auto") return;
  int width = 0, height = 0;
  char rest = 0;
  if (size.size() > 20 || std::sscanf(size.c_str(), "%dx%d%c", &width, &height, &rest) != 2)
    throw Refusal(400,
                  fmt::format("size is '{}'; expected WIDTHxHEIGHT, as in 1024x1024, or auto", size.substr(0, 40)));
  r.width = width, r.height = height;
}

/// Fields that generations and edits share; reading removes them.
struct Common {
  std::string model, format;
  json warnings = json::array();

  Common(Service& service, Fields& fields) {
    model = take<std::string>(fields, "model", "");
    service.queue.model(model);  // throws for an unknown model
    format = take<std::string>(fields, "response_format", "url");
    if (format != "url" && format != "b64_json")
      throw Refusal(400, fmt::format("response_format is '{}'; expected url or b64_json", format.substr(0, 40)));
    if (const std::string type = take<std::string>(fields, "output_format", "png"); type != "png")
      warnings.push_back("output_format is ignored: images are PNG files");
    if (take(fields, "stream", false)) throw Refusal(400, "stream is true; expected false: answers are whole");
  }
  void read(Fields& fields, SampleRequest& r) {
    const std::string prompt = take<std::string>(fields, "prompt", "");
    if (prompt.empty()) throw Refusal(400, "prompt is missing; expected a text");
    r.prompt = {prompt};
    r.num_images_per_prompt = take<int64_t>(fields, "n", 1);
    set_size(take<std::string>(fields, "size", ""), r);
    if (const auto seed = take<int64_t>(fields, "seed", -1); seed >= 0)
      r.sample_seed = seed;
    else
      r.sample_seed.reset();
    for (const char* no_effect : {"user", "moderation", "background", "quality", "style"}) fields.erase(no_effect);
    take_keys(fields, r);
    if (const std::string left = warning_of(fields); !left.empty()) warnings.push_back(left);
  }
};

HttpReply generate(Service& service, const HttpCall& call, Common& common, SampleRequest request) {
  const std::string prompt = request.prompt[0];
  const JobQueue::Ticket job = service.queue.submit(common.model, std::move(request));
  json data = json::array();
  const auto host = call.headers.find("host");
  for (const GeneratedImage& image : service.await({job}, call)) {
    std::string png = Service::png_of(image);
    json entry = {{"revised_prompt", prompt}, {"seed", image.seed}, {"parameters", image.parameters}};
    if (common.format == "b64_json")
      entry["b64_json"] = to_base64(png);
    else
      entry["url"] = "http://" + (host == call.headers.end() ? "" : host->second) + service.images.put(std::move(png));
    data.push_back(entry);
  }
  json out = {{"created", now()}, {"data", data}};
  if (!common.warnings.empty()) out["warnings"] = common.warnings;
  return json_reply(out);
}

HttpReply generations(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  Common common(service, fields);
  SampleRequest r = service.queue.model(common.model).defaults;
  common.read(fields, r);
  return generate(service, call, common, std::move(r));
}

HttpReply edits(Service& service, const HttpCall& call) {
  Fields fields;
  std::vector<std::string> images;
  std::string mask;
  if (call.parts.empty()) throw Refusal(400, "the body has no parts; expected multipart/form-data with an image");
  for (const HttpPart& part : call.parts) {
    if (part.name == "image" || part.name == "image[]")
      images.push_back(part.bytes);
    else if (part.name == "mask")
      mask = part.bytes;
    else
      fields[valid_utf8(part.name)] = valid_utf8(part.bytes);
  }
  if (images.empty()) throw Refusal(400, "image is missing; expected an image's file");
  Common common(service, fields);
  SampleRequest r = service.queue.model(common.model).defaults;
  r.height.reset(), r.width.reset();  // default: the image's size
  common.read(fields, r);
  for (const std::string& image : images) r.images.push_back(image_of_bytes(service, "image", image));
  // As in OpenAI's API: transparent pixels are replaced, those of the mask or, without one, of the image.
  r.mask = transparency_of_bytes(service, mask.empty() ? "image" : "mask", mask.empty() ? images[0] : mask);
  if (!mask.empty() && !r.mask) r.mask = image_of_bytes(service, "mask", mask);
  return generate(service, call, common, std::move(r));
}

HttpReply openai_reply(Service& service, const HttpCall& call) {
  const auto is = [&](const char* method, const char* path) { return call.method == method && call.path == path; };
  if (is("POST", "/v1/images/generations")) return generations(service, call);
  if (is("POST", "/v1/images/edits")) return edits(service, call);
  if (is("GET", "/v1/models")) {
    json all = json::array();
    for (const std::string& name : service.queue.models()) all.push_back(model_of(name));
    return json_reply({{"object", "list"}, {"data", all}});
  }
  const std::string models = "/v1/models/";
  if (call.method == "GET" && call.path.starts_with(models)) {
    const std::string name = call.path.substr(models.size());
    for (const std::string& known : service.queue.models())
      if (known == name) return json_reply(model_of(name));
    throw Refusal(404, "there is no such model; GET /v1/models lists them");
  }
  throw Refusal(404, fmt::format("{} {} is not served; expected POST /v1/images/generations or /v1/images/edits, GET "
                                 "/v1/models",
                                 call.method, call.path.substr(0, 100)));
}

}  // namespace

Interface openai_interface() {
  return {[](const std::string& path) { return path.starts_with("/v1/"); }, openai_reply, openai_error};
}

}  // namespace md
