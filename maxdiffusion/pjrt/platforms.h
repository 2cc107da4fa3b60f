// What differs between kinds of hardware, one record per kind, one file per record.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "maxdiffusion/base/dtype.h"
#include "maxdiffusion/pjrt/plugin.h"

namespace md::pjrt {

struct Device;

/// What limits a device beside its products, bytes a second.
struct DeviceRates {
  double memory;   // its own
  double axis;     // to the other devices along one mesh axis of a slice (TPU: both directions of a ring; GPU: NVLink)
  double network;  // to other slices or hosts
};

/// Options of the compiler under one name, for one kind of work.
struct FlagSet {
  const char* name;
  std::vector<std::pair<const char*, const char*>> flags;
};

struct PlatformDef {
  const char* hardware;                                            // as in the config
  std::vector<const char*> plugin_files;                           // inside the folder of unpacked wheels, best first
  const char* wheel;                                               // brings the first of them
  Options default_options;                                         // for the client; the caller's win
  std::vector<std::pair<const char*, const char*>> compile_flags;  // for the compiler; those of the config win
  std::vector<std::pair<const char*, const char*>> lean_flags;     // instead, for programs that favour little memory
  std::vector<FlagSet> flag_sets;                                  // by name, those of the config win
  std::vector<const char*> environment;  // variables that the plugin reads itself and that change what it compiles
  /// Dense FLOP/s of one device for matrix products of this type; absent when not known for the kind.
  std::optional<double> (*peak_flops)(std::string_view device_kind, DType type);
  std::optional<DeviceRates> (*rates)(std::string_view device_kind);
  /// Whether a device multiplies 8-bit floats, or its compiler stands in for it.
  bool (*has_float8)(const Device& device);
  bool memory_is_the_hosts;  // devices compute in memory that the host reads and writes
  const char* ffi_platform;  // name under which custom-call handlers are registered; null: none
  /// What a compiler must be told of a device that is not there (create option target_config of a topology), by its
  /// name in the config; throws invalid_config with the known names. Null: names of topologies say it.
  std::string (*target)(std::string_view device) = nullptr;
  /// Why no such device can be here, found without its plugin, which may wait for minutes; empty: one may be. `root`:
  /// what /dev and /sys are below; empty but in tests. Null: there always is one.
  std::string (*absent)(const std::string& root) = nullptr;
};

extern const PlatformDef kCpuPlatform, kGpuPlatform, kTpuPlatform;

const std::vector<const PlatformDef*>& platforms();
/// Throws invalid_config with the known names.
const PlatformDef& platform_for(std::string_view hardware);

}  // namespace md::pjrt
