#include "maxdiffusion/server/server.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/server/http.h"
#include "maxdiffusion/server/service.h"

namespace md {
namespace {

std::string api_key_of(const ServeKeys& keys) {
  if (!keys.api_key.empty()) return keys.api_key;
  const char* variable = std::getenv("MAXDIFFUSION_API_KEY");
  return variable ? variable : "";
}

/// Compiles the programs for the defaults before the first request.
void warm_up(JobQueue& queue) {
  for (const std::string& name : queue.models()) {
    SampleRequest r = queue.model(name).defaults;
    r.prompt = {""};
    r.num_images_per_prompt = 1, r.sample_seed = 0;
    r.num_inference_steps = std::min<int64_t>(r.num_inference_steps, 2);  // the program is the same for any number
    try {
      queue.submit(name, r);
    } catch (const Error& e) {
      log_info("'{}' is not warmed up: {}", name, e.message());
    }
  }
}

}  // namespace

void serve(std::vector<ServedModel> models, const ServeKeys& keys) {
  for (const std::string& origin : keys.allowed_origins) {
    const size_t host = origin.find("://");
    const bool valid = (origin.starts_with("http://") || origin.starts_with("https://")) && host + 3 < origin.size() &&
                       origin.find_first_of("/* ", host + 3) == origin.npos;
    check(valid, Code::invalid_config,
          "allowed_origins has '{}'; expected origins as browsers send them, such as http://localhost:5001", origin);
  }
  const GracefulStop stop("cancelling what runs");
  const std::string api_key = api_key_of(keys);
  const std::unique_ptr<HttpListener> listener = listen_library().listen(
      {.host = keys.host, .port = keys.port, .max_body = static_cast<size_t>(keys.max_body_mb) << 20});
  Service service(std::move(models), keys, api_key);
  if (keys.warm_up) warm_up(service.queue);
  std::jthread watch([&](const std::stop_token& over) {
    while (!over.stop_requested() && interrupt_signal() == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    service.queue.stop();
    listener->stop();
  });
  log_info("serving on http://{}:{}, {}", keys.host == "0.0.0.0" ? "localhost" : keys.host, listener->port(),
           api_key.empty() ? "without an API key" : "with an API key");
  if (api_key.empty() && keys.host != "127.0.0.1" && keys.host != "localhost")
    log_warning("host is {} without api_key: all who reach this machine can use it", keys.host);
  listener->run([&](const HttpCall& call) { return service.reply(call); });
  log_info("stopped by {}", interrupt_name());
}

}  // namespace md
