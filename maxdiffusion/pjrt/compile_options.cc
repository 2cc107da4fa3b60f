// CompileOptions as the protobuf message XLA reads.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pjrt/compile_options.pb.h"
#include "maxdiffusion/pjrt/executable.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

namespace md::pjrt {

std::string CompileOptions::serialize() const {
  proto::CompileOptions options;
  proto::ExecutableBuildOptions& build = *options.mutable_executable_build_options();
  const auto partitions = static_cast<int64_t>(device_ids.size());
  build.set_device_ordinal(-1);  // unset: see the assignment below
  build.set_num_replicas(1);
  build.set_num_partitions(partitions);
  build.set_use_spmd_partitioning(partitions > 1);
  build.set_use_shardy_partitioner(partitions > 1);
  proto::DeviceAssignment& assignment = *build.mutable_device_assignment();
  assignment.set_replica_count(1);
  assignment.set_computation_count(static_cast<int32_t>(partitions));
  for (int id : device_ids) assignment.add_computation_devices()->add_replica_device_ids(id);
  for (const auto& [name, value] : flags) {
    auto& flag = (*options.mutable_env_option_overrides())[name];
    const bool yes = value == "true" || value == "True", no = value == "false" || value == "False";
    // The plugin parses numbers and names from text, but booleans only in Python's spelling.
    if (yes || no)
      flag.set_bool_field(yes);
    else
      flag.set_string_field(value);
  }

  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);  // the bytes are part of cache keys
    check(options.SerializeToCodedStream(&coded), Code::internal, "compile options: cannot be serialized");
  }
  return bytes;
}

}  // namespace md::pjrt
