// `serve`: models behind HTTP, until a signal.
#pragma once

#include <vector>

#include "maxdiffusion/server/job_queue.h"

namespace md {

/// Loads the models, listens, and answers requests until SIGINT or SIGTERM; then running requests are cancelled and
/// waiting ones answered 503. A signal is not an error. Throws io if the port is in use, and as JobQueue does for
/// models.
void serve(std::vector<ServedModel> models, const ServeKeys& keys);

}  // namespace md
