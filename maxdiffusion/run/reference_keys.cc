#include "maxdiffusion/run/reference_keys.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"

namespace md {
namespace {

void refuse(bool set, const char* key, const char* reason) {
  check(!set, Code::invalid_config, "{} is set, but {}", key, reason);
}

void warn(bool set, const char* key, const char* reason) {
  if (set) log_warning("{} has no effect: {}", key, reason);
}

}  // namespace

void ReferenceKeys::validate() const {
  refuse(!quantization.empty(), "quantization", "quantized training is not there yet; leave it empty");
  refuse(use_qwix_quantization, "use_qwix_quantization", "quantized training is not there yet; set it to false");
  refuse(compile_topology_num_slices > 0, "compile_topology_num_slices",
         "runs take the slices that are attached; leave it at -1");
  constexpr const char* kService = "it belongs to a service of Google's cloud that this program does not speak to";
  refuse(enable_ml_diagnostics, "enable_ml_diagnostics", kService);
  refuse(enable_ondemand_xprof, "enable_ondemand_xprof", kService);
  warn(!profiler_gcs_path.empty(), "profiler_gcs_path", kService);
  warn(enable_mllog, "enable_mllog", "nothing reads it in the reference either");
  warn(!dataset_config_name.empty(), "dataset_config_name", "nothing reads it in the reference either");
  warn(enable_single_replica_ckpt_restoring, "enable_single_replica_ckpt_restoring",
       "every process reads what its devices need");
  warn(!flash_block_sizes.empty(), "flash_block_sizes", "the attention kernels choose their blocks themselves");
}

}  // namespace md
