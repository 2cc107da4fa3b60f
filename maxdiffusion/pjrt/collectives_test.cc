// Which devices communicate, for the replica-group notations that compilers write.
#include "maxdiffusion/pjrt/collectives.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "maxdiffusion/pjrt/hlo.pb.h"

namespace md::pjrt {
namespace {

using Groups = std::vector<std::vector<int64_t>>;

/// Groups along mesh axis `axis` of 2 × 4 devices, or along a part of that axis.
Groups along(int64_t axis, int64_t before = 0, int64_t size = 0, const std::vector<int64_t>& ids = {}) {
  proto::HloModule module;
  proto::HloComputation& entry = *module.add_computations();
  proto::HloInstruction& op = *entry.add_instructions();
  op.set_opcode("all-reduce");
  proto::HloMeshGroups& groups = *op.mutable_mesh_groups();
  for (int64_t n : {2, 4}) groups.mutable_mesh()->add_axes()->set_size(n);
  for (int64_t id : ids) groups.mutable_mesh()->add_device_ids(id);
  proto::HloMeshGroups::Reference& ref = *groups.add_axes();
  ref.set_axis(axis);
  if (size) {
    ref.mutable_part()->set_before(before);
    ref.mutable_part()->set_size(size);
  }
  return read_operations(module.SerializeAsString(), "hlo").collectives.at(0).groups;
}

TEST(CollectiveGroups, AlongAxesOfAMeshAreThoseThatDifferThere) {
  EXPECT_EQ(along(0), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(along(1), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(along(1, 1, 2), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(along(1, 2, 2), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(along(1, 0, 0, {7, 6, 5, 4, 3, 2, 1, 0}), (Groups{{7, 6, 5, 4}, {3, 2, 1, 0}}));
}

TEST(Cost, OfOperationsIsTheCompilersTimesTheTripsOfLoops) {
  proto::HloModule module;
  proto::HloComputation &inside = *module.add_computations(), &body = *module.add_computations(),
                        &condition = *module.add_computations(), &entry = *module.add_computations();
  inside.set_id(1), body.set_id(2), condition.set_id(3), entry.set_id(4);
  module.set_entry_computation_id(4);
  const auto add = [](proto::HloComputation& to, const char* opcode, int64_t cycles) -> proto::HloInstruction& {
    proto::HloInstruction& op = *to.add_instructions();
    op.set_opcode(opcode);
    if (cycles) op.set_backend_config(fmt::format(R"({{"window_config":{{"estimated_cycles":"{}"}}}})", cycles));
    return op;
  };
  add(inside, "add", 1000000);  // of a fusion: the fusion's cycles are counted
  add(body, "fusion", 300).add_called_computation_ids(1);
  add(body, "custom-call", 0)
      .set_backend_config(R"({"custom_call_config":{"body":"","cost_estimate":{"flops":7000,"transcendentals":3}}})");
  add(entry, "fusion", 20).add_called_computation_ids(1);
  proto::HloInstruction& loop = add(entry, "while", 0);
  loop.set_backend_config(R"({"known_trip_count":{"n":"40"}})");
  loop.add_called_computation_ids(2);
  loop.add_called_computation_ids(3);
  const Operations found = read_operations(module.SerializeAsString(), "hlo");
  EXPECT_EQ(found.cycles, 20 + 40 * 300);
  EXPECT_EQ(found.kernel_flops, 40 * 7000);
}

}  // namespace
}  // namespace md::pjrt
