// Compiling for unattached devices.
#include "maxdiffusion/pjrt/topology.h"

#include <cstdlib>
#include <utility>

#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/device.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {

Topology Topology::create(const std::string& hardware, const std::string& name, const std::string& plugin_path,
                          int64_t slices, const std::string& device) {
  // Without a TPU there is no metadata server, and libtpu would wait for one. There is also no device that only one
  // process may use.
  if (hardware == "tpu") {
    setenv("TPU_SKIP_MDS_QUERY", "1", 0);
    setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1", 0);
  }
  Options options;
  if (slices > 1) options["num_slices"] = slices;
  const PlatformDef& platform = platform_for(hardware);
  if (platform.target) options = {{"topology", name}, {"target_config", platform.target(device)}};
  auto plugin = Plugin::load(plugin_path.empty() ? Plugin::find(hardware) : plugin_path);
  Topology t = [&] {
    try {
      return Topology(std::move(plugin), platform, platform.target ? "" : name, options);
    } catch (const Error& e) {
      if (platform.target) throw;
      throw Error(Code::invalid_config, fmt::format("topology: '{}' is not a topology of this plugin", name))
          .note("try: v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x4 or larger ones: the chips of a slice in each direction")
          .note(e.message());
    }
  }();
  // The CUDA plugin puts all GPUs in one slice.
  const auto partitions = platform.target ? std::strtoull(name.c_str(), nullptr, 10) : 1;
  for (size_t i = 0; partitions > 1 && i < t.devices_.size(); ++i)
    t.devices_[i].slice = static_cast<int>(i * partitions / t.devices_.size());
  return t;
}

Topology::Topology(std::shared_ptr<Plugin> plugin, const PlatformDef& def, const std::string& name,
                   const Options& options)
    : plugin_(std::move(plugin)), platform_(&def) {
  const PJRT_Api* api = plugin_->api();
  const std::vector<PJRT_NamedValue> values = named_values(options);
  PJRT_TopologyDescription_Create_Args create{};
  create.topology_name = name.data();
  create.topology_name_size = name.size();
  create.create_options = values.data();
  create.num_options = values.size();
  PJRT_CALL(api, PJRT_TopologyDescription_Create, create);
  handle_ = create.topology;
  PJRT_TopologyDescription_PlatformName_Args platform{};
  platform.topology = create.topology;
  PJRT_CALL(api, PJRT_TopologyDescription_PlatformName, platform);
  platform_name_.assign(platform.platform_name, platform.platform_name_size);
  PJRT_TopologyDescription_PlatformVersion_Args version{};
  version.topology = create.topology;
  PJRT_CALL(api, PJRT_TopologyDescription_PlatformVersion, version);
  platform_version_.assign(version.platform_version, version.platform_version_size);
  PJRT_TopologyDescription_GetDeviceDescriptions_Args all{};
  all.topology = create.topology;
  PJRT_CALL(api, PJRT_TopologyDescription_GetDeviceDescriptions, all);
  for (size_t i = 0; i < all.num_descriptions; ++i) {
    devices_.push_back(describe(api, all.descriptions[i]));
    devices_.back().addressable = false;
  }
}

Topology::Topology(Topology&& o) noexcept
    : plugin_(std::move(o.plugin_)),
      handle_(std::exchange(o.handle_, nullptr)),
      platform_(o.platform_),
      platform_name_(std::move(o.platform_name_)),
      platform_version_(std::move(o.platform_version_)),
      devices_(std::move(o.devices_)) {}

Topology::~Topology() {
  if (!handle_) return;
  PJRT_TopologyDescription_Destroy_Args args{};
  args.topology = static_cast<PJRT_TopologyDescription*>(handle_);
  PJRT_CALL_QUIET(plugin_->api(), PJRT_TopologyDescription_Destroy, args);
}

Compiled Topology::compile(std::string_view mlir, const CompileOptions& options) const {
  const PJRT_Program program = mlir_program(mlir);
  const std::string bytes = options.serialize();
  PJRT_Compile_Args args{};
  args.topology = static_cast<const PJRT_TopologyDescription*>(handle_);
  args.program = &program;
  args.compile_options = bytes.data();
  args.compile_options_size = bytes.size();
  PJRT_CALL(plugin_->api(), PJRT_Compile, args);
  return Compiled(plugin_->api(), args.executable);
}

}  // namespace md::pjrt
