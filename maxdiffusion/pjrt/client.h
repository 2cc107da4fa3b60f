// PJRT C API, wrapped once: plugin, client, devices, buffers, executables, topologies. No other folder includes
// pjrt_c_api.h; this header does not either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/dtype.h"
#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/pjrt/key_values.h"
#include "maxdiffusion/pjrt/plugin.h"

namespace md::pjrt {

class Client;
struct PlatformDef;

/// Completion of work on a device or of a copy. Move only.
class Event {
 public:
  Event() = default;
  Event(const PJRT_Api* api, void* handle) : api_(api), handle_(handle) {}
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;
  ~Event();
  explicit operator bool() const { return handle_ != nullptr; }
  /// Whether it is complete, with success or failure.
  bool ready() const;
  /// Blocks; throws device with the reason when it failed.
  void wait() const;
  /// Keeps `owner` alive until the event completes. Does not block. No effect for an empty event.
  void keep_alive(std::shared_ptr<const void> owner) const;

 private:
  const PJRT_Api* api_ = nullptr;
  void* handle_ = nullptr;  // PJRT_Event*
};

/// A buffer on one device. Move only. Freed on destruction; the runtime waits for users of the memory.
/// The client must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();
  explicit operator bool() const { return handle_ != nullptr; }
  int64_t bytes_on_device() const;
  /// Address of the contents. Readable only for buffers of a CPU.
  uintptr_t address() const;
  /// True once the memory went to an output of a program (or was freed).
  bool deleted() const;
  /// Completes when the contents are computed.
  Event ready() const;
  /// Blocks until the contents are computed; throws device with the error of the computation.
  void wait() const;
  /// Starts copying the contents, dense and row-major, to `to`, which must stay valid until the event completes.
  Event copy_to_host(void* to, size_t bytes, int64_t rank) const;

 private:
  friend class Client;
  friend class Executable;
  Buffer(const Client* client, void* handle) : client_(client), handle_(handle) {}
  const Client* client_ = nullptr;
  void* handle_ = nullptr;  // PJRT_Buffer*
};

struct Device {
  int id = 0;
  int process = 0;
  int slice = 0;                        // slices are joined by a data-centre network
  std::string kind;                     // "cpu", "NVIDIA H100 80GB HBM3", "TPU v5p"
  std::vector<int> coords;              // position in the torus of a TPU, else empty
  double compute_capability = 0;        // of NVIDIA GPUs: 9 for Hopper
  bool addressable = true;              // by this process
  std::optional<int64_t> memory_limit;  // bytes; if known
  void* handle = nullptr;               // PJRT_Device*; null for unattached topologies
};

/// Bytes of one device's allocator, if the plugin reports them.
struct DeviceMemory {
  int64_t in_use = 0;
  std::optional<int64_t> peak, limit;
};

class Client {
 public:
  /// `hardware`: cpu, gpu or tpu. `options` override the platform's defaults ("cpu_device_count" for virtual devices);
  /// `plugin_path` replaces the search for the plugin. `shared`: key-value store of the processes of a multi-process
  /// client (options "node_id" and "num_nodes"); returns when all have connected.
  static std::shared_ptr<Client> open(const std::string& hardware, const Options& options = {},
                                      const std::string& plugin_path = "", std::shared_ptr<KeyValues> shared = nullptr);
  Client(const Client&) = delete;
  /// Waits for running copies and programs.
  ~Client();

  const Plugin& plugin() const { return *plugin_; }
  const PJRT_Api* api() const { return plugin_->api(); }
  const PlatformDef& platform() const { return *platform_; }
  const std::string& platform_name() const { return platform_name_; }
  const std::string& platform_version() const { return platform_version_; }
  int process_index() const { return process_index_; }
  /// All devices of all processes, in the plugin's order.
  const std::vector<Device>& devices() const { return devices_; }
  /// Throws device for an unknown id.
  const Device& device(int id) const;
  std::optional<DeviceMemory> memory(int device_id) const;
  /// Dense FLOP/s of one device, where known; see PlatformDef.
  std::optional<double> peak_flops(DType type) const;
  /// Whether its devices multiply 8-bit floats; see PlatformDef.
  bool has_float8() const;

  /// Copies `shape` elements from `data` to a device and returns at once. `byte_strides`: bytes between neighbours
  /// along each dim of `data`; empty: dense. `owner` is held until the copy is done; dense bytes of a mapped file then
  /// lose their pages. `zero_copy`: no other code uses the bytes; if the device's memory is the host's, the buffer
  /// adopts them and keeps `owner`. `in_host_memory`: the buffer is in host memory that the device reads (kind
  /// pinned_host); throws device if the plugin has none.
  Buffer put(int device_id, const Shape& shape, const void* data, const std::vector<int64_t>& byte_strides,
             std::shared_ptr<const void> owner, bool zero_copy = false, bool in_host_memory = false) const;
  void* handle() const { return handle_; }

 private:
  friend class Buffer;
  friend class Executable;
  /// Work on the plugin's threads; the destructor waits for it.
  struct Work;
  /// A handle to hold until an asynchronous operation completes; keeps `owner` alive.
  std::shared_ptr<const void> track(std::shared_ptr<const void> owner = {}) const;
  Client(std::shared_ptr<Plugin> plugin, const PlatformDef& platform, const Options& options,
         std::shared_ptr<KeyValues> shared);
  std::shared_ptr<Plugin> plugin_;
  std::shared_ptr<KeyValues> shared_;  // the plugin may call it while the client lives
  const PlatformDef* platform_;
  void* handle_ = nullptr;  // PJRT_Client*
  std::string platform_name_, platform_version_;
  int process_index_ = 0;
  std::vector<Device> devices_;
  std::shared_ptr<Work> work_;
};

}  // namespace md::pjrt
