// What devices do together in a compiled program, and what of it is calls into libraries, read from the compiler's own
// form of it (HLO, after partitioning).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace md::pjrt {

/// One operation of the program that devices do together.
struct Collective {
  std::string kind;  // all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, collective-broadcast
  /// Partitions that talk with each other; of a permute: pairs of source and target. Empty: all with all.
  std::vector<std::vector<int64_t>> groups;
  int64_t bytes = 0;  // on one device: of what is gathered, when whole; otherwise of what the operation is given
  double times = 1;   // a run: inside loops, the product of their trips
  bool in_unknown_loop = false;  // of a loop around it the compiler does not say the trips; counted once
  bool between_slices = false;   // devices at one place of all slices talk, through their hosts; groups are empty
  std::string name;              // of the operation it was made for, as far as the compiler kept it
};

/// Custom calls of one target: cuDNN's and cuBLAS's, kernels; those that a run of kernels makes, too.
struct CustomCalls {
  int64_t operations = 0;  // in the program
  double runs = 0;         // with the trips of loops, as far as the compiler says them
};

/// Copies and transposes that put the axes of an array into another order in memory, alone or as part of what the
/// compiler joined with them.
struct Turned {
  std::vector<int64_t> dims;  // of the result
  int64_t bytes = 0;          // of the result
  double times = 1;           // a run, likewise
  std::string name;           // of the operation it was made for, as far as the compiler kept it
};

struct Operations {
  std::vector<Collective> collectives;
  std::map<std::string, CustomCalls> custom_calls;  // by target
  std::vector<Turned> turned;
  std::map<std::string, int64_t> products;  // matrix products and convolutions by their types: "s8 × s8 → s32"
  /// What the program starts one by one, loops' bodies included once: calls, and loops that the compiler made; and how
  /// many of these do nothing but change an array's type.
  int64_t instructions = 0, type_changes = 0;
};

/// `program`: HloModuleProto or HloModuleProtoWithConfig, as `format` says ("hlo", "hlo_with_config"). Throws device on
/// bytes that are neither.
Operations read_operations(std::string_view program, std::string_view format);

}  // namespace md::pjrt
