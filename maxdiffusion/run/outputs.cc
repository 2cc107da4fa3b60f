#include "maxdiffusion/run/outputs.h"

#include <filesystem>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/storage/staging.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// Fetches what another machine, or an earlier run of this one, has left in the bucket, unless there is more of it
/// here.
void bring(const FoundFile& found, const std::string& to) {
  std::error_code ec;
  if (const auto size = std::filesystem::file_size(to, ec); ec || static_cast<int64_t>(size) < found.size)
    get_file(found, to);
}

}  // namespace

RunConfig on_this_machine(const RunConfig& given) {
  RunConfig c = given;
  if (!is_remote(c.run.output_dir) && !is_remote(c.metrics.metrics_file) && !is_remote(c.run.timing_metrics_file))
    return c;
  c.places = {c.run.output_dir, c.metrics.metrics_file, c.run.timing_metrics_file};
  for (std::string* place : {&c.run.output_dir, &c.metrics.metrics_file, &c.run.timing_metrics_file}) {
    const bool remote = is_remote(*place);
    *place = staging(*place);
    if (remote) make_folders(std::filesystem::path(*place).parent_path());
  }
  return c;
}

Outputs::Outputs(const RunConfig& given, bool leads) : config_(on_this_machine(given)) {
  if (!leads) return;
  lock_.emplace(config_.folder());
  if (!config_.places) return;
  std::vector<Mirror::Pair> pairs;
  if (const std::string place = config_.place(); is_remote(place)) {
    log_info("{} is made in '{}' on this machine", shown(place), config_.folder());
    claim_.emplace(place, this_process());
    const size_t root = parts_of(below(place, "")).path.size();
    for (const FoundFile& f : all_below(place)) {
      const std::string name = parts_of(f.location).path.substr(root);
      if (name == "config.yml" || name == "metrics.jsonl" || name.ends_with("/metrics.jsonl"))
        bring(f, config_.folder() + "/" + name);
    }
    pairs.push_back({config_.folder(), place});
  }
  for (const auto& [local, location] :
       {std::pair{config_.metrics.metrics_file, config_.places->metrics_file},
        std::pair{config_.run.timing_metrics_file, config_.places->timing_metrics_file}}) {
    if (!is_remote(location)) continue;
    if (const auto found = find_file(location)) bring(*found, local);
    pairs.push_back({local, location});
  }
  mirror_ = std::make_unique<Mirror>(std::move(pairs), std::set<std::string>{"checkpoints", "cache"});
}

std::function<void()> Outputs::flushed() const {
  if (!mirror_) return {};
  return [this] { mirror_->changed(); };
}

std::function<void()> Outputs::before_commit() const {
  if (!mirror_) return {};
  return [this] {
    mirror_->settle();
    if (claim_) claim_->check();
  };
}

void Outputs::finish() {
  if (mirror_) mirror_->settle();
}

}  // namespace md
