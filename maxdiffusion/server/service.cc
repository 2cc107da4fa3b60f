#include "maxdiffusion/server/service.h"

#include <arpa/inet.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/lower_case.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/config/config.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

using nlohmann::json;

/// Compares secrets in constant time, so that the time does not reveal where the first difference is.
bool same_secret(const std::string& a, const std::string& b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i] ^ b[b.empty() ? 0 : i % b.size()]);
  return difference == 0;
}

std::string header(const HttpCall& call, const char* name) {
  const auto found = call.headers.find(name);
  return found == call.headers.end() ? "" : found->second;
}

/// Whether a browser asks if a page of another place may send a request (CORS).
bool is_preflight(const HttpCall& call) {
  return call.method == "OPTIONS" && call.headers.contains("origin") &&
         call.headers.contains("access-control-request-method");
}

/// "localhost:7860" → "localhost", "[::1]:7860" → "[::1]".
std::string without_port(const std::string& host) {
  const size_t colon = host.rfind(':');
  const bool port = colon != host.npos && host.find_first_not_of("0123456789", colon + 1) == host.npos;
  return port ? host.substr(0, colon) : host;
}

/// By number where it is an address: "127.0.0.1.example" is a name that anyone's DNS may answer for.
bool is_this_machine(const std::string& its_host) {
  const std::string host = lower_case(its_host);
  in_addr address{};
  if (inet_pton(AF_INET, host.c_str(), &address) == 1) return ntohl(address.s_addr) >> 24 == 127;
  return host == "localhost" || host == "::1" || host == "[::1]";
}

const Interface& interface_of(const std::string& path) {
  static const Interface all[] = {openai_interface(), a1111_interface(), runs_interface(), page_interface()};
  return *std::ranges::find_if(all, [&](const Interface& i) { return i.takes(path); });
}

std::string text_of(const Error& e) {
  std::string text = e.message();
  for (const std::string& note : e.notes()) text += "; " + note;
  return text;
}

}  // namespace

std::pair<int, std::string> shown_to_client(const Error& e) {
  if (const auto* refusal = dynamic_cast<const Refusal*>(&e)) return {refusal->status(), text_of(e)};
  if (const auto* unavailable = dynamic_cast<const Unavailable*>(&e)) return {unavailable->status(), text_of(e)};
  if (e.code() == Code::invalid_config) return {400, text_of(e)};
  if (e.code() == Code::out_of_memory) return {507, "the device's memory is used up; try a smaller image"};
  log_error("a request failed: {}", text_of(e));
  return {500, "the request failed; the server's log says why"};
}

std::string random_name() {
  static std::random_device device;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

std::string ImageStore::put(std::string png) {
  const std::lock_guard lock(mutex_);
  size_ += png.size();
  images_.emplace_back("/images/" + random_name() + ".png", std::make_shared<const std::string>(std::move(png)));
  for (; size_ > most_ && images_.size() > 1; images_.pop_front()) size_ -= images_.front().second->size();
  return images_.back().first;
}

std::shared_ptr<const std::string> ImageStore::find(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(images_, path, [](const auto& image) { return image.first; });
  return found == images_.end() ? nullptr : found->second;
}

Service::Service(std::vector<ServedModel> models, const ServeKeys& limits, std::string api_key)
    : queue(std::move(models), limits),
      keys(limits),
      images(size_t{256} << 20),
      default_model(queue.models().empty() ? "" : queue.models().front()),
      api_key_(std::move(api_key)) {}

bool Service::allows(const std::string& origin) const {
  return std::ranges::find(keys.allowed_origins, origin) != keys.allowed_origins.end();
}

void Service::check_access(const HttpCall& call) const {
  // Web pages of other sites must not use the server through a browser on this machine, whatever host name they use.
  const std::string host = header(call, "host"), origin = header(call, "origin");
  if (is_this_machine(keys.host) && !host.empty() && !is_this_machine(without_port(host)))
    throw Refusal(403, fmt::format("the request is for host '{}'; expected localhost", host));
  if (!origin.empty() && origin != "http://" + host && origin != "https://" + host && !allows(origin))
    throw Refusal(403, fmt::format("the request comes from a page of {}; expected one of this server, or of "
                                   "allowed_origins",
                                   origin));
  if (is_preflight(call)) return;  // browsers send it without the key
  if (api_key_.empty() || call.path == "/" || call.path == "/runs" || call.path.starts_with("/images/")) return;
  std::string client_key = header(call, "x-api-key");
  if (const std::string bearer = header(call, "authorization");
      client_key.empty() && lower_case(bearer).starts_with("bearer "))
    client_key = bearer.substr(7);
  if (!same_secret(api_key_, client_key))
    throw Refusal(401, client_key.empty() ? "no API key is given; expected it as a bearer token or in X-API-Key"
                                          : "the API key is not this server's");
}

HttpReply Service::reply(const HttpCall& call) {
  HttpReply reply = reply_or_error(call);
  if (const std::string origin = header(call, "origin"); allows(origin)) {
    reply.headers["Access-Control-Allow-Origin"] = origin;
    reply.headers["Vary"] = "Origin";
  }
  return reply;
}

HttpReply Service::reply_or_error(const HttpCall& call) {
  const Interface& its = interface_of(call.path);
  std::pair<int, std::string> error;
  try {
    check_access(call);
    if (is_preflight(call))
      return {.status = 204,
              .body = "",
              .headers = {{"Access-Control-Allow-Methods", "GET, POST, DELETE"},
                          {"Access-Control-Allow-Headers", "Authorization, Content-Type, X-API-Key"},
                          {"Access-Control-Max-Age", "600"}}};
    if (call.state == HttpCall::Body::too_large)
      throw Refusal(413,
                    fmt::format("the body is larger than {} MB; expected at most so many: the server's max_body_mb",
                                keys.max_body_mb));
    if (call.state == HttpCall::Body::malformed) throw Refusal(400, "the body ends early or has no valid form");
    HttpReply reply = its.reply(*this, call);
    reply.headers["X-Content-Type-Options"] = "nosniff";
    return reply;
  } catch (const Error& e) {
    error = shown_to_client(e);
  } catch (const json::exception& e) {
    error = {400, fmt::format("the request cannot be read: {}", e.what())};
  } catch (const std::bad_alloc&) {
    error = {507, "the server's memory is used up"};
  } catch (const std::exception& e) {
    log_error("{} {}: {}", call.method, call.path, e.what());
    error = {500, "internal error; the server's log says why"};
  }
  HttpReply reply{.status = error.first, .body = dump_json(its.error(error.first, valid_utf8(error.second)))};
  if (error.first == 401) reply.headers["WWW-Authenticate"] = "Bearer";
  if (error.first == 429) reply.headers["Retry-After"] = "5";
  return reply;
}

std::vector<GeneratedImage> Service::await(const std::vector<JobQueue::Ticket>& jobs, const HttpCall& call) {
  try {
    std::vector<GeneratedImage> out;
    for (const JobQueue::Ticket& job : jobs) {
      JobStatus s = queue.status(job);
      for (; !s.ended(); s = queue.status(job)) {
        if (!call.connected()) throw Refusal(499, "the client is gone");
        queue.wait(job, 500);
      }
      if (s.state == JobState::cancelled) throw Refusal(409, "the request was interrupted");
      if (s.error)
        if (const auto* unavailable = dynamic_cast<const Unavailable*>(s.error.get())) throw Unavailable(*unavailable);
      if (s.error) throw Error(*s.error);
      out.insert(out.end(), s.images.begin(), s.images.end());
    }
    return out;
  } catch (...) {
    for (const JobQueue::Ticket& job : jobs) queue.cancel(job);
    throw;
  }
}

std::string Service::png_of(const GeneratedImage& image) {
  return encode_png(image.rgb, {{"parameters", image.parameters}});
}

Fields json_fields(const HttpCall& call) {
  // A form of another site can send any other type without a CORS preflight.
  if (!lower_case(header(call, "content-type")).starts_with("application/json"))
    throw Refusal(415, fmt::format("the body's type is '{}'; expected application/json", header(call, "content-type")));
  json body;
  try {
    body = parse_json(call.body);
  } catch (const json::exception& e) {
    throw Refusal(400, fmt::format("the body is no JSON object: {}", shortened(valid_utf8(e.what()), 200)));
  }
  if (!body.is_object()) throw Refusal(400, "the body is no JSON object");
  Fields out;
  for (const auto& [name, value] : body.items()) out[name] = value;
  sort_fields(out, call.path);
  return out;
}

std::string shown_value(const json& value) {
  const std::string text = valid_utf8(dump_json(value));
  return text.size() <= 40 ? text : valid_utf8(text.substr(0, 40)) + "…";
}

HttpReply json_reply(const json& value) { return {.body = dump_json(value)}; }

namespace {

/// The value as T; nothing if it has another type.
template <class T>
std::optional<T> as(const json& value);
template <>
std::optional<std::string> as(const json& v) {
  return v.is_string() ? std::optional(v.get<std::string>()) : std::nullopt;
}
/// As the imitated interfaces take them: true, 1, "true", "True".
template <>
std::optional<bool> as(const json& v) {
  if (v.is_boolean()) return v.get<bool>();
  if (v.is_number()) return v == 0 || v == 1 ? std::optional(v == 1) : std::nullopt;
  if (!v.is_string()) return {};
  const std::string text = lower_case(v.get<std::string>());
  if (text == "true" || text == "1" || text == "yes" || text == "on") return true;
  if (text == "false" || text == "0" || text == "no" || text == "off") return false;
  return {};
}
/// A number, also as a text of a form; null: it is none.
json number_of(const json& v) {
  if (v.is_boolean()) return v.get<bool>() ? 1 : 0;
  const json number = v.is_string() ? parse_json_or_discard(v.get<std::string>()) : v;
  return number.is_number() ? number : json();
}
template <>
std::optional<double> as(const json& v) {
  const json number = number_of(v);
  return number.is_number() && std::isfinite(number.get<double>()) ? std::optional(number.get<double>()) : std::nullopt;
}
/// `T`: int64_t or uint64_t. Nothing for other values, never a rounded one.
template <class T>
std::optional<T> whole(const json& v) {
  const json number = number_of(v);
  constexpr uint64_t kMost = std::numeric_limits<T>::max();
  if (number.is_number_unsigned()) {
    const auto value = number.get<uint64_t>();
    return value <= kMost ? std::optional(static_cast<T>(value)) : std::nullopt;
  }
  if (number.is_number_integer()) {
    const auto value = number.get<int64_t>();
    return value >= 0 || std::is_signed_v<T> ? std::optional(static_cast<T>(value)) : std::nullopt;
  }
  constexpr double kExact = 9007199254740992;  // 2⁵³
  const std::optional<double> value = as<double>(v);
  if (!value || *value != std::floor(*value) || std::abs(*value) > kExact) return {};
  return *value >= 0 || std::is_signed_v<T> ? std::optional(static_cast<T>(*value)) : std::nullopt;
}
template <>
std::optional<int64_t> as(const json& v) {
  return whole<int64_t>(v);
}

template <class T>
constexpr const char* kTypeName = "a text";
template <>
constexpr const char* kTypeName<bool> = "true or false";
template <>
constexpr const char* kTypeName<double> = "a finite number";
template <>
constexpr const char* kTypeName<int64_t> = "a whole number";

/// "a text", or a number's value.
std::string described(const json& value) {
  if (value.is_number()) return shown_value(value);
  return fmt::format("a{} {}", value.is_array() || value.is_object() ? "n" : "", value.type_name());
}

}  // namespace

template <class T>
T take(Fields& fields, const std::string& name, T otherwise) {
  const auto found = fields.find(name);
  if (found == fields.end()) return otherwise;
  const json value = found->second;
  fields.erase(found);
  if (value.is_null()) return otherwise;
  const std::optional<T> out = as<T>(value);
  if (!out) throw Refusal(400, fmt::format("{} is {}; expected {}", name, described(value), kTypeName<T>));
  return *out;
}
template std::string take(Fields&, const std::string&, std::string);
template bool take(Fields&, const std::string&, bool);
template double take(Fields&, const std::string&, double);
template int64_t take(Fields&, const std::string&, int64_t);

std::optional<Seed> take_seed(Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  if (found == fields.end()) return {};
  const json value = found->second;
  if (const std::optional<uint64_t> seed = whole<uint64_t>(value)) {
    fields.erase(found);
    return Seed(*seed);
  }
  const auto seed = take<int64_t>(fields, name, -1);
  return seed < 0 ? std::nullopt : std::optional(Seed(seed));
}

std::set<std::string> take_keys(Fields& fields, SampleRequest& request) {
  KeyList keys;
  keys.add(static_cast<SampleKeys&>(request));
  keys.add(request.scheduler);
  std::set<std::string> set_keys;
  for (const std::string& name : request_keys()) {
    const auto found = fields.find(name);
    if (found == fields.end()) continue;
    const json value = found->second;
    fields.erase(found);
    if (value.is_null()) continue;
    const ConfigKey& key = *std::ranges::find(keys.keys(), name, &ConfigKey::name);
    ConfigValue v{.text = value.is_string() ? value.get<std::string>() : dump_json(value), .where = "the request"};
    const bool is_text = key.type == "text" || name.ends_with("prompt") || name.ends_with("prompt_2");
    if (value.is_string()) v.kind = is_text ? ConfigValue::Kind::quoted : ConfigValue::Kind::word;
    if (value.is_array()) v.kind = ConfigValue::Kind::list;
    if (value.is_object()) v.kind = ConfigValue::Kind::mapping;
    if (key.type.starts_with("true"))
      if (const std::optional<bool> on = as<bool>(value)) v.text = *on ? "true" : "false";
    key.set(v);
    set_keys.insert(name);
  }
  return set_keys;
}

std::vector<std::string> warnings_of(Service& service, const Fields& fields,
                                     const std::vector<JobQueue::Ticket>& jobs) {
  std::vector<std::string> all = fields.warnings;
  for (const JobQueue::Ticket& job : jobs)
    std::ranges::copy(service.queue.status(job).warnings, std::back_inserter(all));
  for (const auto& [name, value] : fields) all.push_back(fmt::format("{} is ignored", name.substr(0, 60)));
  std::vector<std::string> once;
  for (std::string& text : all)
    if (std::ranges::find(once, text) == once.end()) once.push_back(valid_utf8(text));
  return once;
}

namespace {

DecodedImage decoded(const Service& service, const std::string& field, const std::string& bytes, bool alpha) try {
  const int64_t most = 8 * service.keys.max_pixels, most_side = JobQueue::most_side(service.keys);
  const ImageSize size = decode_stored_image(bytes.data(), bytes.size(), field, {.only_size = true}).size;
  if (std::max(size.height, size.width) > most_side)
    throw Refusal(400, fmt::format("{} has {}x{} pixels; expected sides of at most {}", field, size.width, size.height,
                                   most_side));
  if (size.height * size.width > most)
    throw Refusal(400, fmt::format("{} has {}x{} pixels; expected at most {}", field, size.width, size.height, most));
  return decode_stored_image(bytes.data(), bytes.size(), field, {.alpha = alpha});
} catch (const Error& e) {
  if (e.code() != Code::io) throw;
  throw Refusal(400, e.message());
}

}  // namespace

HostArray image_of_bytes(const Service& service, const std::string& field, const std::string& bytes) {
  return decoded(service, field, bytes, false).rgb;
}

HostArray transparency_of_bytes(const Service& service, const std::string& field, const std::string& bytes) {
  const HostArray alpha = decoded(service, field, bytes, true).alpha;
  if (!alpha || std::ranges::all_of(alpha.view<uint8_t>(), [](uint8_t v) { return v == 255; })) return {};
  HostArray out(alpha.shape());
  std::ranges::transform(alpha.view<uint8_t>(), out.mutable_view<uint8_t>().begin(),
                         [](uint8_t v) { return static_cast<uint8_t>(255 - v); });
  return out;
}

std::string bytes_of_text(const std::string& field, const std::string& text) {
  std::string_view data = text;
  data.remove_prefix(std::min(data.find_first_not_of(" \t\r\n"), data.size()));
  if (data.starts_with("data:")) data.remove_prefix(std::min(data.find(','), data.size() - 1) + 1);
  if (data.starts_with("http://") || data.starts_with("https://"))
    throw Refusal(400,
                  fmt::format("{} is not base64 but an address, and the server fetches nothing; expected an image's "
                              "file",
                              field));
  std::optional<std::string> bytes = from_base64(data);
  if (!bytes || bytes->empty()) throw Refusal(400, fmt::format("{} is not base64; expected an image's file", field));
  return std::move(*bytes);
}

std::vector<JobQueue::Ticket> submit_each(Service& service, const std::string& model, const SampleRequest& request,
                                          const std::set<std::string>& set_keys, int64_t images) {
  if (images < 1 || images > service.keys.max_images)
    throw Refusal(400, fmt::format("{} images are requested; expected 1 to {}, the server's max_images", images,
                                   service.keys.max_images));
  SampleRequest r = request;
  r.num_images_per_prompt = 1;
  if (!r.sample_seed || r.sample_seed->is_random()) r.sample_seed = random_seed();
  std::vector<JobQueue::Ticket> jobs;
  try {
    for (int64_t i = 0; i < images; ++i) {
      jobs.push_back(service.queue.submit(model, r, set_keys));
      r.sample_seed = r.sample_seed->value() + 1;  // after 2⁶⁴ − 1 comes 0
    }
  } catch (...) {
    for (const JobQueue::Ticket& job : jobs) service.queue.cancel(job);
    throw;
  }
  return jobs;
}

}  // namespace md
