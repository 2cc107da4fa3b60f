#include "maxdiffusion/data/batches/image_batches.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/images/test_images.h"
#include "maxdiffusion/data/records/open_source.h"

namespace md {
namespace {

TEST(ImageBatches, InBucketsHoldEveryImageAndGoOnAfterSeek) {
  set_log_level(LogLevel::error);
  const Mixed mixed;
  ImageConfig config = in_small_buckets();
  config.random_flip = config.random_crop = config.sizes = true;
  const auto numbers = [](const std::vector<std::string>& captions) {
    std::vector<int32_t> v;
    for (const std::string& c : captions) v.push_back(c.empty() ? -1 : std::stoi(c));
    return Batch{{"number", HostArray::of<int32_t>({DType::s32, {static_cast<int64_t>(v.size())}}, v)}};
  };
  const auto open = [&] {
    const ImagesInBuckets sorted =
        sort_into_aspect_buckets(open_source({.train_data_dir = mixed.folder.path()}), config);
    EXPECT_EQ(sorted.sizes, (std::vector<ImageSize>{{20, 12}, {16, 16}, {12, 20}}));
    EXPECT_EQ(sorted.records[2].size(), 5u);  // the bad image's header is valid
    return image_batches(sorted, config, {.stream = {.seed = 2}, .batch = 2, .workers = 2}, numbers);
  };
  auto whole = open();
  std::vector<Batch> expected;
  std::vector<Position> cuts;
  std::map<int32_t, int> times;
  for (int i = 0; i < 16; ++i) {
    cuts.push_back(whole->position());
    expected.push_back(whole->next());
    for (int32_t n : expected.back().at("number").view<int32_t>()) ++times[n];
  }
  EXPECT_EQ(times.size(), 7u);  // every image that decodes
  EXPECT_FALSE(times.contains(-1));
  for (size_t cut : {1, 6, 13}) {
    auto data = prefetch(open(), 2);
    data->seek(cuts[cut]);
    for (size_t i = cut; i < expected.size(); ++i) {
      const Batch b = data->next();
      for (const auto& [name, a] : expected[i]) {
        ASSERT_EQ(b.at(name).shape(), a.shape()) << name;
        ASSERT_EQ(std::memcmp(b.at(name).data(), a.data(), a.bytes()), 0) << name << " " << cut << " " << i;
      }
    }
  }
  set_log_level(LogLevel::info);
}

TEST(ImageBatches, InBucketsReadRecordsThatComeInOrder) {
  const std::string files = MD_SOURCE_DIR "/tests/golden/data/files/";
  ImageConfig config = in_small_buckets();
  for (const std::string& where : {files + "shard-000000.tar", files + "pictures.tfrecord"}) {
    const auto source = open_source({.train_data_dir = where});
    ASSERT_GT(source->shards(), 0);
    const ImagesInBuckets sorted = sort_into_aspect_buckets(source, config);
    std::map<std::string, std::string> by_number, in_order;
    for (const auto& bucket : sorted.records)
      for (int64_t i : bucket) {
        const Record r = sorted.source->read(i);
        by_number[r.name] = r.caption + std::string(r.image.bytes);
      }
    RecordStream stream(source, {.shuffle = false});
    for (auto n = stream.next(); n.epoch == 0; n = stream.next()) {
      const Record r = n.read();
      in_order[r.name] = r.caption + std::string(r.image.bytes);
    }
    EXPECT_GT(by_number.size(), 2u);
    EXPECT_EQ(by_number, in_order);
  }
}

}  // namespace
}  // namespace md
