// Keys of the server: its address, access, and limits of requests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"

namespace md {

struct ServeKeys {
  std::string host = "127.0.0.1", api_key, runs;
  std::vector<std::string> allowed_origins;
  int64_t port = 7860, max_pixels = int64_t{2048} * 2048, max_steps = 150, max_images = 16, max_queue = 256,
          max_body_mb = 32;
  bool warm_up = true;
  template <class V>
  void visit(V&& v) {
    v("port", port, "port of the server; 0: any free one, which is logged", in_range(0, 65535));
    v("host", host,
      "address of the server; 127.0.0.1: only this machine can connect; 0.0.0.0: every machine that reaches it");
    v("api_key", api_key,
      "clients must send it as a bearer token or X-API-Key; never logged; empty: MAXDIFFUSION_API_KEY, or no key",
      Secret());
    v("allowed_origins", allowed_origins,
      "web pages of other places that may use the server through a browser: origins, as in http://localhost:5001, in a "
      "list; empty: none");
    v("runs", runs,
      "folder of training runs, or a run, that the server shows at /runs as their report, live; empty: none",
      KeyPath::input);
    v("max_pixels", max_pixels, "largest height × width of a sample, also after hires_scale and upscale", at_least(64));
    v("max_steps", max_steps, "most denoising steps of a request", at_least(1));
    v("max_images", max_images, "most images of a request", at_least(1));
    v("max_queue", max_queue, "most requests that wait; one more is answered 429", at_least(1));
    v("warm_up", warm_up, "compile the programs of default requests at the start");
    v("max_body_mb", max_body_mb, "largest body of a request, MB, decompressed", in_range(1, 1024));
  }
};

}  // namespace md
