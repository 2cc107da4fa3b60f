#include "maxdiffusion/mesh/batch_share.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

Mesh mesh(int64_t data, int64_t fsdp, int64_t tensor) {
  Topology t{.platform = "cpu", .device_kind = "cpu", .devices = {}};
  for (int i = 0; i < data * fsdp * tensor; ++i) t.devices.push_back({.id = i, .process = 0, .slice = 0, .coords = {}});
  MeshConfig c;
  c.ici_data_parallelism = data, c.ici_fsdp_parallelism = fsdp, c.ici_tensor_parallelism = tensor;
  return Mesh::make(c, t);
}

using Rows = std::vector<int64_t>;
const Sharding kDataAndFsdp{{{"data", "fsdp"}}};

TEST(IsFirstHolder, OneDeviceOfEachShardIs) {
  const Mesh m = mesh(2, 2, 2);
  for (const Sharding& s : {Sharding{}, Sharding{{{"data"}}}, Sharding{{{}, {"tensor", "data"}}},
                            Sharding{{{"fsdp"}, {"data"}, {"tensor"}}}}) {
    std::vector<Slice> firsts;
    for (int64_t device = 0; device < 8; ++device) {
      const Slice slice = shard_of(m, s, {8, 8, 8}, device);
      const bool seen = std::find(firsts.begin(), firsts.end(), slice) != firsts.end();
      EXPECT_EQ(is_first_holder(m, s, device), !seen);
      if (!seen) firsts.push_back(slice);
    }
    EXPECT_EQ(tiling_fault({8, 8, 8}, firsts), "");
  }
}

TEST(BatchShare, IsAllOfTheBatchForOneProcess) {
  const BatchShare share = batch_share(mesh(2, 2, 2), kDataAndFsdp, std::vector<int>(8, 0), 0);
  EXPECT_EQ(share, BatchShare{});
  EXPECT_EQ(share.rows(3), (Rows{0, 1, 2}));
}

TEST(BatchShare, IsTheRowsOnTheDevicesOfTheProcess) {
  // Two halves of data; two halves of tensor, which hold the same rows; interleaved; four hosts of a torus.
  const Mesh m = mesh(2, 2, 2);
  EXPECT_EQ(batch_share(m, kDataAndFsdp, {0, 0, 0, 0, 1, 1, 1, 1}, 1), (BatchShare{1, 2, {}}));
  EXPECT_EQ(batch_share(m, kDataAndFsdp, {1, 1, 1, 1, 0, 0, 0, 0}, 1), (BatchShare{0, 2, {}}));
  EXPECT_EQ(batch_share(m, kDataAndFsdp, {0, 1, 0, 1, 0, 1, 0, 1}, 1), BatchShare{});
  EXPECT_EQ(batch_share(m, {}, {0, 1, 2, 3, 4, 5, 6, 7}, 5), BatchShare{});
  EXPECT_EQ(batch_share(m, kDataAndFsdp, {0, 1, 2, 3, 4, 5, 6, 7}, 5), (BatchShare{2, 4, {}}));
  EXPECT_EQ(batch_share(m, kDataAndFsdp, {0, 0, 1, 1, 0, 0, 1, 1}, 1), (BatchShare{1, 2, {1, 3}}));
  EXPECT_EQ(BatchShare({1, 2, {1, 3}}).rows(8), (Rows{2, 3, 6, 7}));
  const std::vector<int> torus = {0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3};
  std::set<int64_t> all;
  for (int process = 0; process < 4; ++process) {
    const BatchShare share = batch_share(mesh(16, 1, 1), {{{"data"}}}, torus, process);
    EXPECT_EQ(share.process, process);
    EXPECT_EQ(share.processes, 4);
    const Rows rows = share.rows(32);
    EXPECT_EQ(rows.size(), 8u);
    for (int64_t r : rows) EXPECT_EQ(torus[static_cast<size_t>(r / 2)], process);
    all.insert(rows.begin(), rows.end());
  }
  EXPECT_EQ(all.size(), 32u);
}

TEST(BatchShare, SharesThatOverlapInPartAreRefused) {
  const Mesh m = mesh(4, 1, 1);
  for (const std::vector<int>& processes : {std::vector<int>{0, 0, 0, 1}, {0, 1, 1, 1}}) {
    try {
      batch_share(m, {{{"data"}}}, processes, 0);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_NE(e.message().find("of 4 parts of a batch process 0 holds"), std::string::npos) << e.message();
    }
  }
  EXPECT_THROW(batch_share(mesh(2, 1, 2), {{{"data"}}}, {0, 0, 1, 0}, 0), Error);
  EXPECT_THROW(BatchShare({0, 2, {}}).rows(3), Error);
  EXPECT_THROW(BatchShare({1, 2, {1, 3}}).rows(6), Error);
}

TEST(BatchShare, RowsAreShardsOfTheBatch) {
  HostArray batch(Shape{DType::s32, {8, 3}});
  auto v = batch.mutable_view<int32_t>();
  std::iota(v.begin(), v.end(), 0);
  const ShardedArray whole = batch;
  for (const BatchShare& share : {BatchShare{}, BatchShare{1, 2, {}}, BatchShare{0, 2, {0, 2}}, BatchShare{1, 4, {}}}) {
    const Rows rows = share.rows(8);
    HostArray mine(Shape{DType::s32, {static_cast<int64_t>(rows.size()), 3}});
    for (size_t i = 0; i < rows.size(); ++i)
      for (size_t k = 0; k < 3; ++k) mine.mutable_view<int32_t>()[i * 3 + k] = v[static_cast<size_t>(rows[i]) * 3 + k];
    const ShardedArray shards = share.shards(mine);
    EXPECT_EQ(shards.shape, whole.shape);
    for (int64_t r : rows)
      EXPECT_EQ(shards.read({{r, 0}, {1, 3}}).to_doubles(), whole.read({{r, 0}, {1, 3}}).to_doubles());
    EXPECT_EQ(shards.complete(), share.processes == 1);
    EXPECT_EQ(shards.shards.size(), share.parts.empty() ? 1u : 2u);
  }
}

}  // namespace
}  // namespace md
