// The list of optimizers. A new one is one file and one row here.
#include "maxdiffusion/optim/optimizer_entry.h"

#define OPTIMIZERS(X)    \
  X(adafactor)           \
  X(adamw)               \
  X(adamw8bit)           \
  X(came)                \
  X(lion)                \
  X(muon)                \
  X(prodigy)             \
  X(schedule_free_adamw) \
  X(sgd)

namespace md {

#define DECLARE(name) OptimizerEntry name();
OPTIMIZERS(DECLARE)
#undef DECLARE

namespace {

const std::vector<OptimizerEntry>& entries() {
#define ENTRY(name) name(),
  static const std::vector<OptimizerEntry> all = {OPTIMIZERS(ENTRY)};
#undef ENTRY
  return all;
}

}  // namespace

std::vector<OptimizerKey> optimizer_keys() {
  std::vector<OptimizerKey> keys;
  for (const OptimizerEntry& e : entries()) keys.insert(keys.end(), e.keys.begin(), e.keys.end());
  return keys;
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const OptimizerEntry& e : entries()) names.emplace_back(e.name);
  return names;
}

std::vector<OptimizerArgument> optimizer_arguments(const std::string& optimizer) {
  for (const OptimizerEntry& e : entries())
    if (optimizer == e.name) return e.arguments;
  return {};
}

std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& config) {
  for (const OptimizerEntry& e : entries())
    if (config.optimizer == e.name) return e.make(config);
  fail(Code::invalid_config, "optimizer is '{}'; expected {}", config.optimizer, one_of(optimizer_names()).text());
}

}  // namespace md
