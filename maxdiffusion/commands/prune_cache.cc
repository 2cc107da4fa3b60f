// `prune_cache`: removes from a latent cache what no run uses any more.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/run/cache_use.h"

namespace md {

Command prune_cache_command() {
  return {"prune_cache", "CACHE|RUN",
          "remove the latents and text embeddings of a cache that no run's dataset uses any more",
          [](const Words& words) {
            check(words.size() == 1, Code::invalid_config,
                  "prune_cache: found {} words after it; expected a cache's folder or a run's", words.size());
            prune_cache(words[0]);
          },
          [](const KeyPrinter&) {}};
}

}  // namespace md
