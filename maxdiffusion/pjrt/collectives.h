// Collective operations of a compiled program, read from the compiler's own form of it (HLO, after partitioning).
#pragma once

#include <cstdint>
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
  std::string name;              // of the operation it was made for, as far as the compiler kept it
};

/// `program`: HloModuleProto or HloModuleProtoWithConfig, as `format` says ("hlo", "hlo_with_config"). Throws device on
/// bytes that are neither.
std::vector<Collective> read_collectives(std::string_view program, std::string_view format);

}  // namespace md::pjrt
