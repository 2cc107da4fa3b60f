// Collectives and custom calls of a compiled program, read from its partitioned HLO.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace md::pjrt {

/// One collective.
struct Collective {
  std::string kind;  // all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, collective-broadcast
  /// Replica groups; for a permute: pairs of source and target. Empty: all partitions.
  std::vector<std::vector<int64_t>> groups;
  int64_t bytes = 0;             // bytes on one device: of the result of a gather, else of the operand
  double times = 1;              // executions per run: inside loops, the product of trip counts
  bool in_unknown_loop = false;  // an enclosing loop has an unknown trip count, counted as one
  bool between_slices = false;   // across slices, through their hosts; groups are empty
  std::string name;              // name of the original operation, if the compiler kept it
};

/// Custom calls of one target: cuDNN, cuBLAS, kernels; includes the calls inside fused calls.
struct CustomCalls {
  int64_t operations = 0;  // in the program
  double runs = 0;         // executions per run, with known trip counts of loops
};

/// Copies and transposes that change the memory layout of an array, alone or inside a fusion.
struct Turned {
  std::vector<int64_t> dims;  // of the result
  int64_t bytes = 0;          // of the result
  double times = 1;           // executions per run
  std::string name;           // name of the original operation, if the compiler kept it
};

/// An asynchronous copy from an array in the host's memory, of a part of it or whole.
struct HostCopy {
  int64_t bytes = 0;       // of the result
  double times = 1;        // executions per run
  int64_t overlapped = 0;  // products, fusions and calls that the program starts between its start and its end
  int64_t after = 0;       // products that the same body of a loop, or the program outside loops, starts before it

  double bytes_of_run() const { return static_cast<double>(bytes) * times; }
};

struct Operations {
  std::vector<Collective> collectives;
  std::vector<HostCopy> host_copies;
  std::map<std::string, CustomCalls> custom_calls;  // by target
  std::vector<Turned> turned;
  std::map<std::string, int64_t> products;  // matrix products and convolutions by their types: "s8 × s8 → s32"
  /// Number of top-level instructions that the program starts (fusions, calls; bodies of loops once), and how many of
  /// them only convert a type.
  int64_t instructions = 0, type_changes = 0;
  /// TPUs, one run: cycles that the compiler expects its own operations to take one after the other, and FLOPs of
  /// kernels by their cost_estimate. Messages and copies are not included.
  double cycles = 0, kernel_flops = 0;
};

/// `program`: HloModuleProto or HloModuleProtoWithConfig, selected by `format` ("hlo", "hlo_with_config"). Throws
/// device for other bytes.
Operations read_operations(std::string_view program, std::string_view format);

}  // namespace md::pjrt
