// Keys that cannot be combined, and keys that need others: one table, one message form.
#pragma once

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {

/// Throws invalid_config, naming the keys and the reason, for what training cannot obey.
void check_training_keys(const RunConfig& config, const Family& family);
/// Throws likewise for what prepare_tfrecords cannot obey.
void check_tfrecord_keys(const RunConfig& config);

}  // namespace md
