// Graph → executable → device arrays. The only code that moves data between host and devices.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/batch_share.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/mesh/sharding.h"
#include "maxdiffusion/mesh/shards.h"
#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/runtime/collectives.h"

namespace md {

class AxisRules;
namespace pjrt {
class Compiled;
class Topology;
}  // namespace pjrt

/// An array on the devices of a mesh: one buffer per addressable device. Move only; empty after donation.
class Array {
 public:
  Array() = default;
  Array(Shape shape, Sharding sharding, std::vector<pjrt::Buffer> shards);
  Array(Array&&) noexcept = default;
  Array& operator=(Array&&) noexcept = default;

  explicit operator bool() const { return !shards_.empty(); }
  const Shape& shape() const { return shape_; }
  const Sharding& sharding() const { return sharding_; }
  std::vector<pjrt::Buffer>& shards() { return shards_; }
  const std::vector<pjrt::Buffer>& shards() const { return shards_; }
  /// Bytes on one device (the first).
  int64_t bytes_per_device() const;

 private:
  Shape shape_;
  Sharding sharding_;
  std::vector<pjrt::Buffer> shards_;
};

/// Named arrays: parameters, optimizer state, a batch, outputs.
using ArrayMap = std::map<std::string, Array>;

/// Client and mesh. Must outlive its arrays and programs.
class Devices {
 public:
  /// `rules`: logical axes to mesh axes.
  Devices(std::shared_ptr<pjrt::Client> client, Mesh mesh, AxisRules rules = AxisRules::defaults());
  /// One device of this hardware, or the mesh of `config` over `cpu_devices` virtual CPU devices (other hardware: over
  /// all it has). For tests and tools.
  static Devices open(const std::string& hardware = "cpu", int64_t cpu_devices = 1, const MeshConfig& config = {});
  pjrt::Client& client() const { return *client_; }
  const Mesh& mesh() const { return mesh_; }
  const AxisRules& rules() const { return rules_; }
  /// Positions in mesh order of the devices of this process: shard k of an Array is on device local()[k].
  const std::vector<int64_t>& local() const { return local_; }
  /// The process of each device, in mesh order, and this one.
  const std::vector<int>& processes() const { return processes_; }
  int process() const { return process_; }
  /// The rows of a batch on devices of this process, if axis 0 is sharded as `batch`.
  BatchShare batch_share(const Sharding& batch) const { return md::batch_share(mesh_, batch, processes_, process_); }
  /// Processes with separate clients (CPU) are replicas: each runs the same programs on its rows of every batch, and
  /// gradients are summed over all (ops/process_sum.h). Index of this replica, and their number.
  int64_t replica() const { return replica_; }
  int64_t replicas() const { return replicas_; }
  void set_replica(int64_t replica, int64_t replicas) { replica_ = replica, replicas_ = replicas; }
  /// Number of devices of all replicas.
  int64_t count() const { return mesh_.devices() * replicas_; }
  /// These devices as seen by process `process` if device i, in mesh order, belonged to processes[i]: for tests.
  /// Programs do not run on it.
  Devices as_process(int process, std::vector<int> processes) const;
  /// Whether devices of other processes are included: all processes must then run every program.
  bool joint() const { return local_.size() < processes_.size(); }
  /// The devices of this process, along the axis data.
  Devices local_devices() const;
  Platform platform() const;
  /// Options of graphs for these devices; `rules` may be null (all replicated).
  GraphOptions graph_options(const AxisRules* rules = nullptr) const;

  /// Asynchronous; keeps the bytes of `a` alive until the transfer is complete.
  Array put(const HostArray& a, const Sharding& sharding = {}, const std::string& name = "array") const;
  /// Puts an array by slices: `values` returns a slice in the type of `shape`; it is called on this thread once for
  /// each distinct slice on devices of this process. On a CPU with one device, bytes with one owner (HostArray::sole)
  /// are not copied.
  Array put(const Shape& shape, const std::function<HostArray(const Slice&)>& values, const Sharding& sharding = {},
            const std::string& name = "array") const;
  /// Waits for the device. Throws device if devices of other processes hold a part of the array.
  HostArray get(const Array& a) const;

 private:
  std::shared_ptr<pjrt::Client> client_;
  Mesh mesh_;
  AxisRules rules_;
  std::vector<int64_t> local_;
  std::vector<int> processes_;
  int process_;
  int64_t replica_ = 0, replicas_ = 1;
};

/// Memory layout of convolution weights [out, in, window…] on TPUs: [window…, in, out] if the window is larger than 1,
/// after a layer axis. Empty (row-major) for other arrays. It is the layout that the compiler would choose. For
/// GraphOptions::memory_order.
Axes filters_before_channels(const LogicalAxes& axes, const Dims& dims);

inline Sharding sharding_of(const GraphInput& in) { return {in.sharding, in.order, in.in_host_memory}; }

/// The devices of a client, or of unattached hardware (pjrt/topology.h), for Mesh::make.
Topology topology(const pjrt::Client& client);
Topology topology(const pjrt::Topology& absent);
/// Options of graphs for this mesh; `rules` may be null (all replicated).
GraphOptions graph_options(const Mesh& mesh, const Topology& topology, const AxisRules* rules = nullptr);

/// A running copy of an array's shards to the host. Copies of this object share the transfer.
class PendingShards {
 public:
  PendingShards() = default;
  bool ready() const;
  ShardedArray wait() const;  // throws device on failure
  /// When the copy ended, even if wait() was called later; before that, now.
  std::chrono::steady_clock::time_point ended() const;
  struct State;
  explicit PendingShards(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};
/// The distinct shards on devices of this process: all, or those whose first holder (mesh/sharding.h) is a device of
/// this process, so that each shard is owned by one process.
enum class Which { local, owned };
/// Starts copying to the host without waiting for the device.
PendingShards fetch_shards(const Devices& devices, const Array& a, Which which = Which::owned);
/// Like fetch_shards, but shards are read lazily: borrowed if the device's memory is the host's (CPU), else copied at
/// each read. `a` must not be moved or donated while they are in use.
ShardedArray shards_in_place(const Devices& devices, const Array& a, Which which = Which::owned);

/// A running copy of a whole array to the host.
class PendingArray {
 public:
  PendingArray() = default;
  explicit PendingArray(PendingShards shards) : shards_(std::move(shards)) {}
  bool ready() const { return shards_.ready(); }
  HostArray wait() const { return shards_.wait().whole(); }  // throws device on failure
  std::chrono::steady_clock::time_point ended() const { return shards_.ended(); }

 private:
  PendingShards shards_;
};
/// Throws device if devices of other processes hold a part of the array.
PendingArray fetch(const Devices& devices, const Array& a);

/// The distinct slices, on devices of this process, of an array with these logical axes.
std::vector<Slice> local_slices(const Devices& devices, const LogicalAxes& axes, const Dims& dims);
/// The rows of a program's batch of `rows` samples on devices of this process.
BatchShare share_of_program(const Devices& devices, int64_t rows);
/// The rows that this process reads for one update of `accumulation` consecutive batches, each divided among the
/// replicas.
BatchShare share_of_update(const Devices& devices, int64_t samples, int64_t accumulation = 1);

struct CompileConfig {
  std::string jax_cache_dir;     // executable cache on disk; "" = default folder, "off" = none
  std::string xla_flags;         // extra "--xla_…=value" words
  std::string libtpu_flags;      // name of a set of TPU flags (pjrt/platform_tpu.cc)
  std::string aot_cache_dir;     // replaces jax_cache_dir; also holds programs for unattached devices
  bool minimize_memory = false;  // not a key: prefers less temporary memory to concurrent operations
  /// Not a key: called with the cache entry of each compiled or cached program. Thread safe, or empty.
  std::function<void(const std::string& entry)> uses;
  template <class V>
  void visit(V&& v) {
    v("jax_cache_dir", jax_cache_dir, "folder of the executable cache; empty: ~/.cache/maxdiffusion, off: none",
      KeyPath::output_or_word);
    v("xla_flags", xla_flags, "extra compiler options, e.g. --xla_backend_optimization_level=1");
    v("libtpu_flags", libtpu_flags,
      "a set of compiler options for TPUs: wan_v5p_train, wan_light, multihost or ulysses");
    v("aot_cache_dir", aot_cache_dir,
      "folder of executables, in place of jax_cache_dir; compile writes those for other machines there",
      KeyPath::output_or_word);
  }
};

/// Calls `compiles` in one process of the program, then in the others, which load the result from the cache, shared or
/// sent over the processes' connection. Without a cache: in all at once. The argument of `compiles` is the config to
/// compile with.
void on_coordinator_first(const Devices& devices, const CompileConfig& config, const std::string& topic,
                          const std::function<void(const CompileConfig&)>& compiles);

struct CompileReport {
  double emit_seconds = 0, compile_seconds = 0, load_seconds = 0;
  bool from_cache = false;
  int64_t program_bytes = 0;                 // of StableHLO text
  std::map<std::string, std::string> flags;  // that the compiler was given
};
/// Planned bytes per device. `host`: in the host's memory, of offloaded values and of swapped blocks.
struct MemoryPlan {
  int64_t arguments = 0, outputs = 0, aliased = 0, temporary = 0, code = 0, host = 0;
  int64_t peak() const { return arguments + outputs - aliased + temporary; }
};
/// "memory per device 5.03 GiB (arguments 4.78, temporary 0.24)"
std::string to_string(const MemoryPlan& plan);

/// A compiled program. Thread safe for run().
class Program {
 public:
  Program(Program&&) noexcept;
  ~Program();

  const std::vector<std::string>& input_names() const;
  const std::vector<std::string>& output_names() const;
  const Shape& input_shape(size_t i) const;
  const Sharding& input_sharding(size_t i) const;
  const Sharding& output_sharding(size_t i) const;

  /// Runs with inputs in the order of input_names(); returns outputs in the order of output_names(). Asynchronous; on a
  /// CPU it first waits for the previous run of this program. Aliased inputs are donated: their Array becomes empty.
  /// Throws device naming an input that is empty or has another shape.
  std::vector<Array> run(const std::vector<Array*>& inputs) const;
  /// By name: looks up every input in `donated` first, then in `retained`. Aliased inputs must be in `donated`, from
  /// which they are removed.
  ArrayMap run(ArrayMap& donated, const ArrayMap& retained = {}) const;

  const CompileReport& report() const;
  std::optional<MemoryPlan> memory() const;
  std::optional<double> flops() const;  // the compiler's own count for one run, one device
  const pjrt::Compiled& compiled() const;

 private:
  friend Program compile_text(const Devices&, const Graph&, const CompileConfig&, const std::string&,
                              const std::string&, CompileReport);
  struct Impl;
  explicit Program(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// StableHLO text → executable, through the cache (key: program text, options, plugin version). `name` appears in logs
/// and profiles. Throws invalid_graph with the compiler's message, out_of_memory, device.
Program compile(const Devices& devices, const Graph& graph, const CompileConfig& config, const std::string& name);

/// Compiled programs that stay in memory: graphs with equal text, inputs and outputs share a program. For one config
/// and one set of devices; keeps the `most` recently used ones. Not thread safe.
class ProgramCache {
 public:
  explicit ProgramCache(size_t most = 16) : most_(most) {}
  /// Like md::compile.
  std::shared_ptr<const Program> compile(const Devices& devices, const Graph& graph, const CompileConfig& config,
                                         const std::string& name);

 private:
  size_t most_;
  std::list<std::pair<std::string, std::shared_ptr<const Program>>> programs_;  // by hash, most recently used first
};

/// Puts host values on the devices with the sharding of the program's inputs, by name. Skips inputs without a value. On
/// a CPU, values with one owner are not copied: move them.
void place(const Devices& devices, const Program& program, NamedShards values, ArrayMap& out);
void place(const Devices& devices, const Program& program, HostArrays values, ArrayMap& out);

/// Cost of a compiled program, on attached or unattached devices.
struct AheadOfTime {
  std::optional<MemoryPlan> memory;
  // One run, one device; the compiler counts a loop's body once.
  std::optional<double> flops, bytes_accessed, estimated_seconds;
  std::optional<std::vector<CollectiveSum>> collectives;
  std::vector<pjrt::HostCopy> host_copies;                // from the host's memory
  std::map<std::string, pjrt::CustomCalls> custom_calls;  // by target; the compiler's FLOP count may exclude theirs
  std::vector<pjrt::Turned> turned;                       // changes of memory layout
  std::map<std::string, int64_t> products;                // by types, as in pjrt::Operations
  int64_t instructions = 0, type_changes = 0;             // as in pjrt::Operations; 0: unknown
  double cycles = 0, kernel_flops = 0;                    // as in pjrt::Operations
  CompileReport report;
  std::string cache_file;  // file of the executable (aot_cache_dir)
};
/// Compiles for devices, or without loading for a topology; errors as compile().
AheadOfTime compile_ahead(const Devices& devices, const Graph& graph, const CompileConfig& config,
                          const std::string& name);
AheadOfTime compile_ahead(const pjrt::Topology& topology, const Mesh& mesh, const Graph& graph,
                          const CompileConfig& config, const std::string& name);

/// Convenience for tests and tools: no cache; inputs by position, outputs on the host.
std::vector<HostArray> evaluate(const Devices& devices, const Graph& graph, const std::vector<HostArray>& inputs);

}  // namespace md
