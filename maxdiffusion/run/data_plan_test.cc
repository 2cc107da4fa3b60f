// How the folders of a dataset are prepared.
#include "maxdiffusion/run/data_plan.h"

#include <gtest/gtest.h>

#include "maxdiffusion/settings/run_config.h"

namespace md {
namespace {

TEST(DataPlan, ImagesNextToClipsAreVideosOfOneFrame) {
  ImageConfig images;
  images.clip = ClipConfig{.frames = 17};
  const FolderImages size{.size = {32, 32}};
  std::vector<DataFolder> folders = {{.where = "clips", .clips = true, .images = size},
                                     {.where = "late", .clips = true, .images = size},
                                     {.where = "images", .images = size}};
  folders[1].images.frames = {9};
  folders[1].images.start = 0.5;
  const ImageConfig all = plan_folders(images, folders, DataKeys{}, nullptr);
  ASSERT_EQ(all.folders.size(), 3u);
  std::vector<int64_t> frames;
  for (const ImageConfig& folder : all.folders) {
    ASSERT_TRUE(folder.clip && folder.buckets);
    ASSERT_EQ(folder.buckets->sizes().size(), 1u);
    frames.push_back(folder.buckets->sizes()[0].frames);
  }
  EXPECT_EQ(frames, (std::vector<int64_t>{17, 9, 1}));
  EXPECT_EQ(all.folders[0].clip->start, 0);
  EXPECT_EQ(all.folders[1].clip->start, 0.5);
}

}  // namespace
}  // namespace md
