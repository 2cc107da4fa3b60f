// Executable: a program compiled for the devices of a client, ready to run.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/collectives.h"

namespace md::pjrt {

struct CompileOptions {
  std::vector<int> device_ids = {0};         // one partition each, in mesh order
  std::map<std::string, std::string> flags;  // compiler flags without the leading dashes
  /// The options as a serialized protobuf message. Deterministic.
  std::string serialize() const;
};

/// The compiler's plan, bytes on one device. `aliased`: argument bytes that outputs reuse. `host`: host memory
/// of arguments and temporary values.
struct MemoryStats {
  int64_t arguments = 0, outputs = 0, aliased = 0, temporary = 0, code = 0, host = 0;
};

/// Properties of a compiled program, loaded or not.
class Compiled {
 public:
  Compiled(const PJRT_Api* api, void* handle) : api_(api), handle_(handle) {}
  Compiled(Compiled&&) noexcept;
  Compiled& operator=(Compiled&&) noexcept;
  ~Compiled();
  /// For Executable::load on the same plugin. Throws device if the plugin does not support it.
  std::string serialize() const;
  std::optional<MemoryStats> memory() const;
  /// The compiler's FLOP count for one run on one device.
  std::optional<double> flops() const { return cost("flops"); }
  /// Bytes read and written in one run of one device, by the compiler's estimate.
  std::optional<double> bytes_accessed() const { return cost("bytes accessed"); }
  /// Seconds of one run by the compiler's model of the device.
  std::optional<double> estimated_seconds() const { return cost("optimal_seconds"); }
  /// Its collectives and custom calls; none if the plugin does not expose its programs.
  std::optional<Operations> operations() const;
  size_t output_count() const;

 private:
  /// A property of the plugin's cost analysis, if present.
  std::optional<double> cost(const char* property) const;

  const PJRT_Api* api_;
  void* handle_;  // PJRT_Executable*
};

struct LastRun;

/// Thread safe. The client must outlive it.
class Executable {
 public:
  /// `mlir`: text of a StableHLO module. Throws device or out_of_memory with the compiler's words.
  static Executable compile(const Client& client, std::string_view mlir, const CompileOptions& options);
  /// From Compiled::serialize().
  static Executable load(const Client& client, std::string_view bytes);
  Executable(Executable&&) noexcept;
  Executable& operator=(Executable&&) noexcept;
  ~Executable();

  const Compiled& compiled() const { return compiled_; }
  /// Ids of its devices in this process, in the order of run().
  const std::vector<int>& device_ids() const { return device_ids_; }
  /// inputs[device][argument] → outputs[device][result]. Returns before the device is done. Buffers of aliased
  /// arguments are donated: they are deleted() afterwards. If the device's memory is the host's, waits for the previous
  /// run of this program, because each run allocates temporary memory.
  std::vector<std::vector<Buffer>> run(const std::vector<std::vector<const Buffer*>>& inputs) const;

 private:
  Executable(const Client& client, void* handle);
  const Client* client_;
  void* handle_;  // PJRT_LoadedExecutable*
  Compiled compiled_;
  std::vector<int> device_ids_;
  size_t outputs_ = 0;
  std::unique_ptr<LastRun> last_run_;  // set if runs wait for each other
};

}  // namespace md::pjrt
