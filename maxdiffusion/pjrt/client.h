// PJRT C API, wrapped once: plugin, client, devices, buffers, executables, topologies. No other folder includes
// pjrt_c_api.h; this header does not either.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md::pjrt {

class Client;

/// A buffer on one device. Move only. Freed on destruction; the runtime waits for users of the memory.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();
  explicit operator bool() const { return handle_ != nullptr; }
  int64_t bytes_on_device() const;
  /// Blocks until the contents are there; throws device with the error of what computed them.
  void wait() const;

 private:
  friend class Client;
  friend class Executable;
  Buffer(const Client* client, void* handle) : client_(client), handle_(handle) {}
  const Client* client_ = nullptr;
  void* handle_ = nullptr;  // PJRT_Buffer*
};

}  // namespace md::pjrt
