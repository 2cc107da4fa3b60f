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

/// Something under way on the device or in a copy. Move only.
class Event {
 public:
  Event() = default;
  Event(const PJRT_Api* api, void* handle) : api_(api), handle_(handle) {}
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;
  ~Event();
  explicit operator bool() const { return handle_ != nullptr; }
  /// Whether it is over, well or badly.
  bool ready() const;
  /// Blocks; throws device with the reason when it failed.
  void wait() const;
  /// Holds `owner` until the event is over. Does not block. Nothing to hold for an empty event.
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
  /// Address of the contents. Only that of a CPU's buffer can be read from.
  uintptr_t address() const;
  /// True once the memory went to an output of a program (or was freed).
  bool deleted() const;
  /// Over when the contents are there.
  Event ready() const;
  /// Blocks until the contents are there; throws device with the error of what computed them.
  void wait() const;
  /// Starts copying the contents, dense and row-major, to `to`, which must stay valid until the event is over.
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
  double compute_capability = 0;        // of a GPU by NVIDIA: 9 for Hopper
  bool addressable = true;              // by this process
  std::optional<int64_t> memory_limit;  // bytes; where the description has them
  void* handle = nullptr;               // PJRT_Device*; null in a topology that is not attached
};

/// Bytes of one device's allocator; not every plugin counts.
struct DeviceMemory {
  int64_t in_use = 0;
  std::optional<int64_t> peak, limit;
};

class Client {
 public:
  /// `hardware`: cpu, gpu or tpu. `options` override the platform's defaults ("cpu_device_count" for virtual devices);
  /// `plugin_path` replaces the search for the plugin. `shared`: where the processes of a client of several find each
  /// other ("node_id" and "num_nodes" among the options say which this is, of how many); returns when all are there.
  static std::shared_ptr<Client> open(const std::string& hardware, const Options& options = {},
                                      const std::string& plugin_path = "", std::shared_ptr<KeyValues> shared = nullptr);
  Client(const Client&) = delete;
  /// Waits for copies and programs that are under way.
  ~Client();

  const Plugin& plugin() const { return *plugin_; }
  const PJRT_Api* api() const { return plugin_->api(); }
  const PlatformDef& platform() const { return *platform_; }
  const std::string& platform_name() const { return platform_name_; }
  const std::string& platform_version() const { return platform_version_; }
  int process_index() const { return process_index_; }
  /// All devices of all processes, in the plugin's order.
  const std::vector<Device>& devices() const { return devices_; }
  /// Throws device when there is none with this id.
  const Device& device(int id) const;
  std::optional<DeviceMemory> memory(int device_id) const;
  /// Dense FLOP/s of one device, where known; see PlatformDef.
  std::optional<double> peak_flops(DType type) const;
  /// Whether its devices multiply 8-bit floats; see PlatformDef.
  bool has_float8() const;

  /// Copies `shape` elements from `data` to a device and returns at once. `byte_strides`: bytes between neighbours
  /// along each dim of `data`; empty: dense. `owner` is held until the copy is done. `given`: nobody else reads or
  /// writes the bytes any more; where the device's memory is the host's they become the array's, and `owner` is held as
  /// long.
  Buffer put(int device_id, const Shape& shape, const void* data, const std::vector<int64_t>& byte_strides,
             std::shared_ptr<const void> owner, bool given = false) const;
  void* handle() const { return handle_; }

 private:
  friend class Buffer;
  friend class Executable;
  /// Work that the plugin does on its own threads; the client waits for its end before it goes.
  struct Work;
  /// Something to be held until an asynchronous operation is over; holds `owner` too.
  std::shared_ptr<const void> track(std::shared_ptr<const void> owner = {}) const;
  Client(std::shared_ptr<Plugin> plugin, const PlatformDef& platform, const Options& options,
         std::shared_ptr<KeyValues> shared);
  std::shared_ptr<Plugin> plugin_;
  std::shared_ptr<KeyValues> shared_;  // the plugin may ask it as long as the client lives
  const PlatformDef* platform_;
  void* handle_ = nullptr;  // PJRT_Client*
  std::string platform_name_, platform_version_;
  int process_index_ = 0;
  std::vector<Device> devices_;
  std::shared_ptr<Work> work_;
};

}  // namespace md::pjrt
