#include "maxdiffusion/settings/values.h"

#include <cmath>
#include <limits>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

constexpr double kAny = std::numeric_limits<double>::infinity();

/// Numbers from `least` to `most`, both included.
struct Range {
  const char* key;
  double (*value)(const RunConfig&);
  double least = 0, most = kAny;
  const char* expected = "0 or more";
};

double number(const std::optional<double>& v) { return v.value_or(0); }

const Range kRanges[] = {
    {"learning_rate", [](const RunConfig& c) { return c.optim.learning_rate; }},
    {"text_encoder_learning_rate", [](const RunConfig& c) { return c.update.text_encoder_learning_rate; }},
    {"vae_learning_rate", [](const RunConfig& c) { return c.vae.vae_learning_rate; }},
    {"vae_kl_weight", [](const RunConfig& c) { return c.vae.vae_kl_weight; }},
    {"checkpoints_to_keep", [](const RunConfig& c) { return static_cast<double>(c.loop.checkpoints_to_keep); }},
    {"warmup_steps_fraction", [](const RunConfig& c) { return c.optim.warmup_steps_fraction; }, 0, 1, "0 to 1"},
    {"max_train_steps", [](const RunConfig& c) { return static_cast<double>(c.optim.max_train_steps); }, -1, kAny,
     "a number of steps, or -1 for num_train_epochs"},
    {"num_train_epochs", [](const RunConfig& c) { return static_cast<double>(c.loop.num_train_epochs); }, -1, kAny,
     "a number of passes over the data"},
    {"cpu_device_count", [](const RunConfig& c) { return static_cast<double>(c.hardware.cpu_device_count); }, 1, 1024,
     "1 to 1024"},
    {"guidance_scale", [](const RunConfig& c) { return c.sample.guidance_scale; }, 0, kAny,
     "0 or more (up to 1: no guidance)"},
    {"guidance_scale_high", [](const RunConfig& c) { return number(c.sample.guidance_scale_high); }},
    {"guidance_scale_low", [](const RunConfig& c) { return number(c.sample.guidance_scale_low); }},
    {"true_cfg_scale", [](const RunConfig& c) { return c.sample.true_cfg_scale; }, 0, kAny,
     "0 or more (up to 1: no guidance)"},
    {"base_shift", [](const RunConfig& c) { return number(c.scheduler.base_shift); }, -kAny, kAny, "a number"},
    {"max_shift", [](const RunConfig& c) { return number(c.scheduler.max_shift); }, -kAny, kAny, "a number"},
    {"guidance_rescale", [](const RunConfig& c) { return c.sample.guidance_rescale; }, -kAny, 1, "up to 1"},
    {"noise_offset", [](const RunConfig& c) { return c.denoise.noise_offset; }},
    {"input_perturbation", [](const RunConfig& c) { return c.denoise.input_perturbation; }},
    {"prior_loss_weight", [](const RunConfig& c) { return c.dreambooth.prior_loss_weight; }},
    {"seed", [](const RunConfig& c) { return static_cast<double>(c.run.seed); }, -1, kAny,
     "0 or more, or -1 for one that is drawn"},
    {"sample_seed", [](const RunConfig& c) { return static_cast<double>(c.sample.sample_seed.value_or(0)); }, -1, kAny,
     "0 or more, or -1 for one that is drawn"},
};

}  // namespace

void check_values(const RunConfig& config) {
  for (const Range& r : kRanges) {
    const double value = r.value(config);
    check(std::isfinite(value), Code::invalid_config, "{} is {}; expected a finite number", r.key, value);
    check(value >= r.least && value <= r.most, Code::invalid_config, "{} is {}; expected {}", r.key, value, r.expected);
  }
  for (const int64_t crop : config.sample.crops_coords_top_left)
    check(crop >= 0, Code::invalid_config, "crops_coords_top_left holds {}; expected 0 or more", crop);
}

}  // namespace md
