// Graph → executable → device arrays. The only code that moves data between host and devices.
#pragma once

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

/// Client and mesh together: everything a stage needs to place data. Outlives the arrays and programs it makes.
class Devices {
 public:
  /// `rules`: how logical axes lie on the mesh.
  Devices(std::shared_ptr<pjrt::Client> client, Mesh mesh, AxisRules rules = AxisRules::defaults());
  /// One device of this hardware, or the mesh of `config` over `cpu_devices` virtual CPU devices (other hardware: over
  /// all it has). What most tests and tools open.
  static Devices open(const std::string& hardware = "cpu", int64_t cpu_devices = 1, const MeshConfig& config = {});
  pjrt::Client& client() const { return *client_; }
  const Mesh& mesh() const { return mesh_; }
  const AxisRules& rules() const { return rules_; }
  /// Positions in mesh order of the devices of this process: shard k of an Array lies on device local()[k].
  const std::vector<int64_t>& local() const { return local_; }
  /// The process of each device, in mesh order, and this one.
  const std::vector<int>& processes() const { return processes_; }
  int process() const { return process_; }
  /// The rows of a batch that devices of this process hold, where axis 0 lies on the mesh as that of `batch`.
  BatchShare batch_share(const Sharding& batch) const { return md::batch_share(mesh_, batch, processes_, process_); }
  /// Several processes of which each has a client of its own (CPU) are replicas: each runs the same programs on devices
  /// like these, with its rows of every batch, and gradients are summed over all (ops/process_sum.h). This one's
  /// number, and how many there are.
  int64_t replica() const { return replica_; }
  int64_t replicas() const { return replicas_; }
  void set_replica(int64_t replica, int64_t replicas) { replica_ = replica, replicas_ = replicas; }
  /// Of all replicas.
  int64_t count() const { return mesh_.devices() * replicas_; }
  /// As process `process` would see these devices if they belonged to `processes`, in mesh order: for tests of several
  /// processes in one. Programs do not run on it.
  Devices as_process(int process, std::vector<int> processes) const;
  /// Whether devices of other processes are among these: programs run on them when all processes run them.
  bool joint() const { return local_.size() < processes_.size(); }
  /// Those of this process, along the axis data.
  Devices own() const;
  Platform platform() const;
  /// What graphs for these devices are opened with; `rules` may be null (everything whole).
  GraphOptions graph_options(const AxisRules* rules = nullptr) const;

  /// Asynchronous: returns at once; the bytes of `a` are kept alive until the transfer is done.
  Array put(const HostArray& a, const Sharding& sharding = {}, const std::string& name = "array") const;
  /// Puts an array that this process need not have whole: `values` gives the bytes of a slice, in its sizes and the
  /// type of `shape`, and is called once for each distinct slice on devices of this process, on this thread. On a CPU
  /// with one device, bytes that nobody else holds (HostArray::sole) become the device's without a copy.
  Array put(const Shape& shape, const std::function<HostArray(const Slice&)>& values, const Sharding& sharding = {},
            const std::string& name = "array") const;
  /// Waits for the device. Throws device where devices of other processes hold a part of the array.
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

/// How TPUs' convolutions read their weights, which are [out, in, window…]: as [window…, in, out], if the window has
/// more than one place. Layers of a stack come first. Empty for other arrays. (GraphOptions::memory_order; the compiler
/// chooses the same where it is left to.)
Axes filters_before_channels(const LogicalAxes& axes, const Dims& dims);

/// The devices of a client, or of hardware that is not attached (pjrt/topology.h), as the mesh sees them.
Topology topology(const pjrt::Client& client);
Topology topology(const pjrt::Topology& absent);
/// What graphs for this mesh are opened with; `rules` may be null (everything whole).
GraphOptions graph_options(const Mesh& mesh, const Topology& topology, const AxisRules* rules = nullptr);

/// A copy of shards of an array to the host that is under way. Copies of this object are the same transfer.
class PendingShards {
 public:
  PendingShards() = default;
  bool ready() const;
  ShardedArray wait() const;  // throws device on failure
  struct State;
  explicit PendingShards(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};
/// The distinct shards on devices of this process: all, or those whose first holder (mesh/sharding.h) is among them,
/// so that each shard of an array is of one process.
enum class Which { local, owned };
/// Starts copying to the host without waiting for the device.
PendingShards fetch_shards(const Devices& devices, const Array& a, Which which = Which::owned);
/// The same shards, made when they are read: borrowed where the device's memory is the host's (CPU), else copied then,
/// so that no more than what is read at a time is held twice. `a` stays where it is, and is not donated, for as long as
/// anything of them is in use.
ShardedArray shards_in_place(const Devices& devices, const Array& a, Which which = Which::owned);

/// A copy of a whole array to the host that is under way.
class PendingArray {
 public:
  PendingArray() = default;
  explicit PendingArray(PendingShards shards) : shards_(std::move(shards)) {}
  bool ready() const { return shards_.ready(); }
  HostArray wait() const { return shards_.wait().whole(); }  // throws device on failure

 private:
  PendingShards shards_;
};
/// Throws device where devices of other processes hold a part of the array.
PendingArray fetch(const Devices& devices, const Array& a);

/// The distinct parts of an array of these logical axes that devices of this process hold.
std::vector<Slice> local_slices(const Devices& devices, const LogicalAxes& axes, const Dims& dims);
/// The rows of a program's batch of `rows` samples that devices of this process hold.
BatchShare share_of_program(const Devices& devices, int64_t rows);
/// The rows of the samples of one update that this process reads: `accumulation` batches, one after the other, of each
/// of which every replica has a part.
BatchShare share_of_update(const Devices& devices, int64_t samples, int64_t accumulation = 1);

struct CompileConfig {
  std::string jax_cache_dir;     // executable cache on disk; "" = default folder, "off" = none
  std::string xla_flags;         // extra "--xla_…=value" words
  std::string libtpu_flags;      // name of a set of flags for TPUs (pjrt/platform_tpu.cc)
  std::string aot_cache_dir;     // in place of jax_cache_dir, and where programs for devices that are not here go
  bool minimize_memory = false;  // no key: rather little temporary memory than operations side by side
  /// No key: told the name in the cache of each program that is compiled or found there. Thread safe, or empty.
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

/// Calls `compiles` in one of the processes that run the program, then in the others, which find in the cache what it
/// has compiled: the same, or what it has sent them over the processes' connection. Where there is no cache in all of
/// them at once. What `compiles` is given is the config to compile with.
void on_coordinator_first(const Devices& devices, const CompileConfig& config, const std::string& topic,
                          const std::function<void(const CompileConfig&)>& compiles);

struct CompileReport {
  double emit_seconds = 0, compile_seconds = 0, load_seconds = 0;
  bool from_cache = false;
  int64_t program_bytes = 0;  // of StableHLO text
};
/// Bytes per device, as the compiler plans them. `host`: what waits in the host's memory (remat policies that offload).
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

  /// Runs with inputs in the order of input_names(); returns outputs in the order of output_names(). Returns before
  /// the device is done; where that is the host, not before the last run of this program is over. Aliased inputs are
  /// consumed: their Array becomes empty.
  /// Throws device naming an input that is empty or has another shape.
  std::vector<Array> run(const std::vector<Array*>& inputs) const;
  /// By name: looks up every input in `donated` first, then in `kept`. Aliased inputs must be in `donated`, and leave
  /// that map.
  ArrayMap run(ArrayMap& donated, const ArrayMap& kept = {}) const;

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

/// StableHLO text → executable, through the cache (key: program text, options, plugin version).
/// `name` appears in logs and profiles. Throws invalid_graph with the compiler's words, out_of_memory, device.
Program compile(const Devices& devices, const Graph& graph, const CompileConfig& config, const std::string& name);

/// Compiled programs that stay in memory: a graph whose text, inputs and outputs are those of an earlier one gets its
/// program again. For one config and the same devices; the `most` that were used last are kept. Not thread safe.
class ProgramCache {
 public:
  explicit ProgramCache(size_t most = 16) : most_(most) {}
  /// As md::compile.
  std::shared_ptr<const Program> compile(const Devices& devices, const Graph& graph, const CompileConfig& config,
                                         const std::string& name);

 private:
  size_t most_;
  std::list<std::pair<std::string, std::shared_ptr<const Program>>> programs_;  // by hash; the last used first
};

/// Puts host values on the devices with the sharding of the program's inputs, by name. Inputs without a value are
/// skipped. On a CPU, values that nobody else holds are not copied: move them here.
void place(const Devices& devices, const Program& program, NamedShards values, ArrayMap& out);
void place(const Devices& devices, const Program& program, HostArrays values, ArrayMap& out);

/// What a program takes, on devices that are there or are not.
struct AheadOfTime {
  std::optional<MemoryPlan> memory;
  // One run, one device; the compiler counts a loop's body once.
  std::optional<double> flops, bytes_accessed, estimated_seconds;
  std::optional<std::vector<CollectiveSum>> collectives;
  std::map<std::string, pjrt::CustomCalls> custom_calls;  // by target; the compiler's count of FLOPs may lack theirs
  std::vector<pjrt::Turned> turned;                       // what the program puts into another order in memory
  std::map<std::string, int64_t> products;                // by types, as pjrt::Operations has them
  int64_t instructions = 0, type_changes = 0;             // as pjrt::Operations has them; 0: the compiler does not say
  CompileReport report;
  std::string kept;  // the file of the executable, where one was asked for (aot_cache_dir)
};
/// Compiles for devices, or without loading for a topology; errors as compile().
AheadOfTime compile_ahead(const Devices& devices, const Graph& graph, const CompileConfig& config,
                          const std::string& name);
AheadOfTime compile_ahead(const pjrt::Topology& topology, const Mesh& mesh, const Graph& graph,
                          const CompileConfig& config, const std::string& name);

/// Convenience for tests and tools: no cache; inputs by position, outputs on the host.
std::vector<HostArray> evaluate(const Devices& devices, const Graph& graph, const std::vector<HostArray>& inputs);

}  // namespace md
