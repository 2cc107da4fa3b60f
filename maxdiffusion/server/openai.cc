// OpenAI's images API: /v1/images/generations, /v1/images/edits, /v1/models. Further fields are sampling keys with
// their names. Source: OpenAI's API reference, "Images" and "Models".
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>

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
  const size_t by = size.find('x');
  const auto side = [&](std::string_view text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || by == size.npos)
      throw Refusal(400,
                    fmt::format("size is '{}'; expected WIDTHxHEIGHT, as in 1024x1024, or auto", size.substr(0, 40)));
    return value;
  };
  r.width = side(std::string_view(size).substr(0, by));
  r.height = side(std::string_view(size).substr(std::min(by, size.size() - 1) + 1));
}

bool has_value(const Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found != fields.end() && !found->second.is_null();
}

/// Fields that generations and edits share; reading removes them.
struct Common {
  std::string model, format;
  std::set<std::string> set_keys;  // keys

  Common(Service& service, Fields& fields) {
    model = take<std::string>(fields, "model", "");
    service.queue.model(model);  // throws for an unknown model
    format = take<std::string>(fields, "response_format", "url");
    if (format != "url" && format != "b64_json")
      throw Refusal(400, fmt::format("response_format is '{}'; expected url or b64_json", format.substr(0, 40)));
  }
  void read(Fields& fields, SampleRequest& r) {
    // Two names of one thing.
    for (const auto& [field, key] :
         {std::pair{"n", "num_images_per_prompt"}, {"seed", "sample_seed"}, {"size", "width"}, {"size", "height"}})
      if (has_value(fields, field) && has_value(fields, key) &&
          (field != std::string("size") || fields[field] != "auto"))
        throw Refusal(400, fmt::format("{} and {} are both given; expected one of them", field, key));
    const std::string prompt = take<std::string>(fields, "prompt", "");
    if (prompt.empty()) throw Refusal(400, "prompt is missing; expected a text");
    r.prompt = {prompt};
    r.num_images_per_prompt = take<int64_t>(fields, "n", 1);
    set_size(take<std::string>(fields, "size", ""), r);
    r.sample_seed = take_seed(fields, "seed");
    set_keys = take_keys(fields, r);
  }
};

HttpReply generate(Service& service, const HttpCall& call, const Common& common, const Fields& fields,
                   SampleRequest request) {
  const std::string prompt = request.prompt[0];
  const JobQueue::Ticket job = service.queue.submit(common.model, std::move(request), common.set_keys);
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
  if (const std::vector<std::string> warnings = warnings_of(service, fields, {job}); !warnings.empty())
    out["warnings"] = warnings;
  return json_reply(out);
}

HttpReply generations(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  Common common(service, fields);
  SampleRequest r = service.queue.model(common.model).defaults;
  common.read(fields, r);
  return generate(service, call, common, fields, std::move(r));
}

/// The images of a request that changes images.
struct EditFiles {
  std::vector<std::string> images;
  std::string mask;  // empty: none
};

EditFiles files_of_parts(const HttpCall& call, Fields& fields) {
  EditFiles out;
  for (const HttpPart& part : call.parts) {
    if (part.name == "image" || part.name == "image[]" || part.name == "images" || part.name == "images[]")
      out.images.push_back(part.bytes);
    else if (part.name == "mask")
      out.mask = part.bytes;
    else
      fields[valid_utf8(part.name)] = valid_utf8(part.bytes);
  }
  sort_fields(fields, call.path);
  return out;
}

/// Of a field: base64 of a file or a data: URL of it, or OpenAI's object {"image_url": URL} (also {"url": URL} in it)
/// or {"b64_json": TEXT}.
std::string bytes_of_field(const std::string& name, const json& value) {
  const json* text = &value;
  if (value.is_object())
    for (const char* member : {"image_url", "b64_json"})
      if (const auto at = value.find(member); at != value.end()) text = &*at;
  if (text != &value && text->is_object())
    if (const auto at = text->find("url"); at != text->end()) text = &*at;
  if (!text->is_string())
    throw Refusal(400, fmt::format("{} is {}; expected base64 of an image's file, or a data: URL of it", name,
                                   shown_value(value)));
  return bytes_of_text(name, text->get<std::string>());
}

EditFiles files_of_json(const HttpCall& call, Fields& fields) {
  fields = json_fields(call);
  EditFiles out;
  for (const char* name : {"image", "images"}) {  // the second is the name in OpenAI's reference
    const auto image = fields.find(name);
    if (image == fields.end()) continue;
    if (image->second.is_array())
      for (const json& one : image->second) out.images.push_back(bytes_of_field(name, one));
    else if (!image->second.is_null())
      out.images.push_back(bytes_of_field(name, image->second));
    fields.erase(image);
  }
  if (const auto mask = fields.find("mask"); mask != fields.end()) {
    if (!mask->second.is_null() && mask->second != "") out.mask = bytes_of_field("mask", mask->second);
    fields.erase(mask);
  }
  return out;
}

HttpReply edits(Service& service, const HttpCall& call) {
  Fields fields;
  if (call.parts.empty() && call.body.empty())
    throw Refusal(400, "the body is empty; expected multipart/form-data with an image, or application/json");
  const auto [images, mask] = call.parts.empty() ? files_of_json(call, fields) : files_of_parts(call, fields);
  if (images.empty()) throw Refusal(400, "image is missing; expected an image's file");
  Common common(service, fields);
  SampleRequest r = service.queue.model(common.model).defaults;
  r.height.reset(), r.width.reset();  // default: the image's size
  common.read(fields, r);
  for (const std::string& image : images) r.images.push_back(image_of_bytes(service, "image", image));
  // As in OpenAI's API: transparent pixels are replaced, those of the mask or, without one, of the image.
  r.mask = transparency_of_bytes(service, mask.empty() ? "image" : "mask", mask.empty() ? images[0] : mask);
  if (!mask.empty() && !r.mask) r.mask = image_of_bytes(service, "mask", mask);
  return generate(service, call, common, fields, std::move(r));
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
