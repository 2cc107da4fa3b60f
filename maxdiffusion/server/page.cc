// The server's page (page.html) and its endpoints: /api/models, /api/generate, /api/jobs/NAME; and /images/NAME.png for
// all interfaces.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/schedulers/sampler_names.h"
#include "maxdiffusion/server/samplers.h"
#include "maxdiffusion/server/service.h"

namespace md {
namespace {

using nlohmann::json;

constexpr std::string_view kPage =
#include "page_html.inc"
    ;

json page_error(int, const std::string& message) { return {{"error", message}}; }

/// A model's data for the page, with the initial values of its fields.
json model_row(Service& service, const std::string& name) {
  const ServedModel& m = service.queue.model(name);
  const Family& family = service.queue.family(name);
  const SampleRequest& r = m.defaults;
  return {{"name", name},
          {"width", r.width.value_or(r.resolution)},
          {"height", r.height.value_or(r.resolution)},
          {"multiple", family.spec().autoencoder->downscale * family.spec().patch},
          {"num_inference_steps", r.num_inference_steps},
          {"guidance_scale", r.guidance_scale},
          {"preview_every", r.preview_every},
          {"negative_prompt", r.negative_prompt.empty() ? "" : r.negative_prompt[0]},
          {"takes_image", family.spec().image_to_image.has_value() || family.reference_images() != nullptr},
          {"takes_mask", family.spec().image_to_image.has_value()},
          {"strength", family.spec().image_to_image ? family.spec().image_to_image->strength : 1.0},
          {"mask_strength", family.spec().image_to_image ? family.spec().image_to_image->inpaint_strength : 1.0},
          {"weighted_prompts", !family.spec().chunk_widths.empty()},
          {"loras", service.queue.loras(name)}};
}

json models_of(Service& service) {
  json models = json::array(), spacings = json::array();
  for (const std::string& name : service.queue.models()) models.push_back(model_row(service, name));
  for (const SigmaScheduleTitle& s : sigma_schedule_titles())
    spacings.push_back({{"name", s.name}, {"label", s.label}});
  return {{"models", models},
          {"samplers", sampler_titles()},
          {"schedules", spacings},
          {"limits",
           {{"max_pixels", service.keys.max_pixels},
            {"max_steps", service.keys.max_steps},
            {"max_images", service.keys.max_images}}}};
}

HttpReply generate(Service& service, const HttpCall& call) {
  Fields fields = json_fields(call);
  const std::string model = take<std::string>(fields, "model", "");
  SampleRequest r = service.queue.model(model).defaults;
  const std::string image = take<std::string>(fields, "image", ""), mask = take<std::string>(fields, "mask", "");
  if (!image.empty()) {
    r.images = {image_of_bytes(service, "image", bytes_of_text("image", image))};
    r.height.reset(), r.width.reset();
  }
  if (!mask.empty()) r.mask = image_of_bytes(service, "mask", bytes_of_text("mask", mask));
  const auto count = take<int64_t>(fields, "images", 1);
  r.sample_seed.reset();
  if (fields.contains("sample_seed")) r.sample_seed = take_seed(fields, "sample_seed");
  const std::set<std::string> set_keys = take_keys(fields, r);
  if (r.prompt.size() != 1) throw Refusal(400, "prompt is missing; expected a text");
  const std::vector<JobQueue::Ticket> jobs = submit_each(service, model, r, set_keys, count);
  const std::string name = random_name();
  const std::vector<std::string> warnings = warnings_of(service, fields, jobs);
  const std::lock_guard lock(service.mutex);
  service.page_jobs.emplace_back(name, jobs);
  // Keeps finished jobs whose images were not fetched, up to this number of images.
  constexpr size_t kMostUnread = 64;
  size_t unread = 0;
  for (size_t i = service.page_jobs.size(); i-- > 0;) {
    const std::vector<JobQueue::Ticket>& its = service.page_jobs[i].second;
    if (!std::ranges::all_of(its, [&](const JobQueue::Ticket& job) { return service.queue.status(job).ended(); }))
      continue;
    unread += its.size();
    if (unread > kMostUnread) service.page_jobs.erase(service.page_jobs.begin() + static_cast<long>(i));
  }
  json out = {{"id", name}};
  if (!warnings.empty()) out["warnings"] = warnings;
  return json_reply(out);
}

/// Formats a server-sent event.
std::string event(const char* name, const json& data) {
  return fmt::format("event: {}\ndata: {}\n\n", name, dump_json(data));
}

/// Sends the jobs' progress, their previews, their images when finished, and "end" with an error or none. Returns false
/// if the client left or a job failed.
bool send_events(Service& service, const std::vector<JobQueue::Ticket>& jobs, const HttpReply::Send& send) {
  std::string error;
  std::vector<std::string> warnings;
  for (size_t i = 0; i < jobs.size(); ++i) {
    json last;
    std::shared_ptr<const std::string> shown;
    for (auto sent = std::chrono::steady_clock::now();;) {
      const JobStatus s = service.queue.status(jobs[i]);
      if (s.ended()) {
        std::ranges::copy_if(s.warnings, std::back_inserter(warnings), [&](const std::string& text) {
          return std::ranges::find(warnings, text) == warnings.end();
        });
        if (s.error) error = shown_to_client(*s.error).second;
        if (s.state == JobState::cancelled) error = "cancelled";
        for (const GeneratedImage& image : s.images)
          if (!send(event("image", {{"url", service.images.put(Service::png_of(image))},
                                    {"seed", image.seed},
                                    {"parameters", image.parameters}})))
            return false;
        break;
      }
      if (s.preview && s.preview != shown) {
        if (!send(event("preview", {{"image", i}, {"url", "data:image/png;base64," + to_base64(*s.preview)}})))
          return false;
        shown = s.preview;
      }
      json now = {{"image", i},       {"images", jobs.size()},
                  {"ahead", s.ahead}, {"step", s.step},
                  {"steps", s.steps}, {"state", s.state == JobState::waiting ? "waiting" : "running"}};
      const bool silent = std::chrono::steady_clock::now() - sent > std::chrono::seconds(5);
      if (now != last || silent) {
        if (!send(event("progress", now))) return false;
        last = now, sent = std::chrono::steady_clock::now();
      }
      service.queue.wait(jobs[i], 1000);
    }
    if (!error.empty()) break;
  }
  return send(event("end", {{"error", error}, {"warnings", warnings}})) && error.empty();
}

HttpReply job(Service& service, const HttpCall& call) {
  const std::string name = call.path.substr(std::string_view("/api/jobs/").size());
  std::vector<JobQueue::Ticket> jobs;
  {
    const std::lock_guard lock(service.mutex);
    const auto found = std::ranges::find(service.page_jobs, name, [](const auto& j) { return j.first; });
    if (found == service.page_jobs.end()) throw Refusal(404, "there is no such job");
    jobs = found->second;
  }
  if (call.method == "DELETE") {
    for (const JobQueue::Ticket& j : jobs) service.queue.cancel(j);
    return json_reply(json::object());
  }
  return {.type = "text/event-stream",
          .headers = {{"Cache-Control", "no-store"}},
          .stream = [&service, jobs, name](const HttpReply::Send& send) {
            if (!send_events(service, jobs, send))
              for (const JobQueue::Ticket& j : jobs) service.queue.cancel(j);
            const std::lock_guard lock(service.mutex);
            std::erase_if(service.page_jobs, [&](const auto& j) { return j.first == name; });
          }};
}

HttpReply page_reply(Service& service, const HttpCall& call) {
  const bool gets = call.method == "GET" || call.method == "HEAD";
  if (gets && call.path == "/" && service.queue.models().empty())
    return {.status = 302, .body = "", .headers = {{"Location", "/runs"}}};
  if (gets && call.path == "/")
    return {
        .type = "text/html; charset=utf-8",
        .body = std::string(kPage),
        .headers = {{"Content-Security-Policy",
                     "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data: "
                     "blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
                    {"Cache-Control", "no-cache"}}};
  if (gets && call.path.starts_with("/images/")) {
    const std::shared_ptr<const std::string> png = service.images.find(call.path);
    if (!png) throw Refusal(404, "there is no such image; the server keeps the newest only");
    return {.type = "image/png", .body = *png, .headers = {{"Cache-Control", "private, max-age=3600"}}};
  }
  if (gets && call.path == "/api/models") return json_reply(models_of(service));
  if (call.method == "POST" && call.path == "/api/generate") return generate(service, call);
  if ((call.method == "GET" || call.method == "DELETE") && call.path.starts_with("/api/jobs/"))
    return job(service, call);
  throw Refusal(404, fmt::format("{} {} is not served", call.method, call.path.substr(0, 100)));
}

}  // namespace

Interface page_interface() {
  return {[](const std::string&) { return true; }, page_reply, page_error};
}

}  // namespace md
