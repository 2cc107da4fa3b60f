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
  /// The message the C API takes. Same options, same bytes.
  std::string serialize() const;
};

/// The compiler's plan, bytes on one device. `aliased`: part of arguments that outputs take over. `host`: temporary
/// memory of the host for it.
struct MemoryStats {
  int64_t arguments = 0, outputs = 0, aliased = 0, temporary = 0, code = 0, host = 0;
};

/// What is known of a compiled program, loaded or not.
class Compiled {
 public:
  Compiled(const PJRT_Api* api, void* handle) : api_(api), handle_(handle) {}
  Compiled(Compiled&&) noexcept;
  Compiled& operator=(Compiled&&) noexcept;
  ~Compiled();
  /// For Executable::load on the same plugin. Throws device where the plugin cannot.
  std::string serialize() const;
  std::optional<MemoryStats> memory() const;
  /// The compiler's own count for one run of one device.
  std::optional<double> flops() const { return cost("flops"); }
  /// Bytes that its operations read and write, likewise.
  std::optional<double> bytes_accessed() const { return cost("bytes accessed"); }
  /// Seconds of one run by the compiler's model of the device, likewise.
  std::optional<double> estimated_seconds() const { return cost("optimal_seconds"); }
  /// What its devices do together, and its calls; nothing where the plugin does not show its programs.
  std::optional<Operations> operations() const;
  size_t output_count() const;

 private:
  /// A property of the plugin's cost analysis, where it has one.
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
  /// Ids of the devices of this process it runs on, in the order run() takes them.
  const std::vector<int>& device_ids() const { return device_ids_; }
  /// inputs[device][argument] → outputs[device][result]. Returns before the device is done. Buffers of aliased
  /// arguments are given away: they are deleted() afterwards. On a device whose memory is the host's it waits
  /// for the last run of this program: each that is under way would hold temporary memory of its own.
  std::vector<std::vector<Buffer>> run(const std::vector<std::vector<const Buffer*>>& inputs) const;

 private:
  Executable(const Client& client, void* handle);
  const Client* client_;
  void* handle_;  // PJRT_LoadedExecutable*
  Compiled compiled_;
  std::vector<int> device_ids_;
  size_t outputs_ = 0;
  std::unique_ptr<LastRun> last_run_;  // of a program whose runs wait for each other
};

}  // namespace md::pjrt
