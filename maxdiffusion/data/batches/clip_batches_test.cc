// Clips in batches, as for images.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/media/decode_video.h"
#include "maxdiffusion/media/test_videos.h"
#include "maxdiffusion/media/write_video.h"

namespace md {
namespace {

constexpr int kFirst = 20;

/// Returns the video with damage after its first frame, and truncated there.
std::pair<std::string, std::string> spoilt(const std::string& whole) {
  const auto decodes = [](const std::string& bytes, int64_t frames) {
    try {
      return decode_video(bytes, "it", {.most = frames}, 1).dims()[0] == frames;
    } catch (const Error&) {
      return false;
    }
  };
  size_t size = whole.size() * 3 / 4;
  while (!decodes(whole.substr(0, size), 1)) ++size;
  for (size_t at = size; at + 8 < whole.size(); ++at) {
    std::string damaged = std::string(whole).replace(at, 8, 8, '\xff');
    if (decodes(damaged, 1) && !decodes(damaged, 5)) return {damaged, whole.substr(0, size)};
  }
  ADD_FAILURE() << "no damage shows";
  return {};
}

/// Clips at 16 frames per second: 0 to 3 have 12 frames of 32×48 pixels, 4 and 5 have 20 of 48×32, 6 is a folder of 12
/// frames. Bad ones: a text, a damaged file, a truncated file, one with 3 frames.
struct Clips {
  TemporaryFolder folder;
  Clips() {
    const auto put = [&](int n, const HostArray& frames) {
      write_mp4(folder / fmt::format("{}.mp4", n), frames, {.fps = 16, .quality = 1, .threads = 1});
      write_file_atomic(folder / fmt::format("{}.txt", n), std::to_string(n));
    };
    for (int n = 0; n < 4; ++n) put(n, grey_frames(12, 32, 48, kFirst + n));
    for (int n = 4; n < 6; ++n) put(n, grey_frames(20, 48, 32, kFirst + n));
    write_frames(folder / "6", grey_frames(12, 32, 48, kFirst + 6));
    write_file_atomic(folder / "6.txt", "6");
  }
  void add_bad() {
    write_file_atomic(folder / "text.mp4", "no video");
    static const auto [damaged, truncated] = spoilt(read_file(folder / "0.mp4"));
    write_file_atomic(folder / "damaged.mp4", damaged);
    write_file_atomic(folder / "truncated.mp4", truncated);
    write_mp4(folder / "short.mp4", grey_frames(3, 32, 48), {.fps = 16});
  }
  std::shared_ptr<const RecordSource> source() const {
    return open_source({.dataset_type = "clip_folder", .train_data_dir = folder.path()});
  }
};

Batch numbers(const std::vector<std::string>& captions) {
  std::vector<int32_t> v;
  for (const std::string& c : captions) v.push_back(c.empty() ? -1 : std::stoi(c));
  return {{"number", HostArray::of<int32_t>({DType::s32, {std::ssize(v)}}, v)}};
}
/// The frame numbers in one row of a batch, by brightness; the row's caption holds the number of the first.
std::vector<int64_t> frames_of(const Batch& b, int64_t row) {
  return numbers_of(without_batch(rows(b.at("pixels"), row, 1)),
                    kFirst + b.at("number").view<int32_t>()[static_cast<size_t>(row)]);
}
void expect_same(const Batch& a, const Batch& b) {
  for (const auto& [name, x] : a) {
    ASSERT_EQ(b.at(name).shape(), x.shape()) << name;
    ASSERT_EQ(std::memcmp(b.at(name).data(), x.data(), x.bytes()), 0) << name;
  }
}

TEST(ClipBatches, HoldTheRequestedFramesWithTheirCaptions) {
  const Clips clips;
  const ImageConfig config{.buckets = AspectBuckets::of({{16, 24, 5}}), .clip = ClipConfig{.fps = 8}};
  const auto data = image_batches(clips.source(), config, {.stream = {.seed = 1}, .batch = 7}, numbers);
  const Batch b = data->next();
  ASSERT_EQ(b.at("pixels").dims(), (Dims{7, 5, 16, 24, 3}));
  ASSERT_EQ(b.at("pixels").dtype(), DType::u8);
  std::set<int32_t> seen;
  for (int64_t i = 0; i < 7; ++i) {
    const int32_t number = b.at("number").view<int32_t>()[static_cast<size_t>(i)];
    seen.insert(number);
    // Every second frame; a folder of frames has no frame rate, so all of them.
    EXPECT_EQ(frames_of(b, i),
              number == 6 ? (std::vector<int64_t>{0, 1, 2, 3, 4}) : (std::vector<int64_t>{0, 2, 4, 6, 8}))
        << number;
  }
  EXPECT_EQ(seen.size(), 7u);
}

TEST(ClipBatches, GoOnAfterSeekToTheBitWhateverTheThreads) {
  Clips clips;
  clips.add_bad();
  const ImageConfig config{.resolution = 16,
                           .random_crop = true,
                           .random_flip = true,
                           .clip = ClipConfig{.frames = 5, .random_start = true}};
  const auto open = [&](int workers) {
    return image_batches(clips.source(), config, {.stream = {.seed = 3}, .batch = 3, .workers = workers}, numbers);
  };
  const auto whole = open(1);
  std::vector<Batch> expected;
  std::vector<Position> cuts;
  std::map<int32_t, std::set<int64_t>> starts;
  for (int i = 0; i < 20; ++i) {
    cuts.push_back(whole->position());
    expected.push_back(whole->next());
    for (int64_t row = 0; row < 3; ++row) {
      const std::vector<int64_t> frames = frames_of(expected.back(), row);
      const int32_t number = expected.back().at("number").view<int32_t>()[static_cast<size_t>(row)];
      starts[number].insert(frames[0]);
      for (size_t k = 0; k < 5; ++k) EXPECT_EQ(frames[k], frames[0] + static_cast<int64_t>(k)) << number;
    }
  }
  EXPECT_EQ(starts.size(), 7u);
  EXPECT_FALSE(starts.contains(-1));  // the bad clips
  std::set<int64_t> all;
  for (const auto& [number, s] : starts) all.insert(s.begin(), s.end());
  EXPECT_TRUE(all.size() > 6 && *all.begin() >= 0 && *all.rbegin() <= 15) << all.size();
  for (size_t cut : {1, 7, 13})
    for (int workers : {2, 5}) {
      const auto data = prefetch(open(workers), 2);
      data->seek(cuts[cut]);
      for (size_t i = cut; i < expected.size(); ++i) expect_same(expected[i], data->next());
    }
}

TEST(ClipBatches, BadClipsAreNamedSkippedAndCounted) {
  Clips clips;
  clips.add_bad();
  const ImageConfig config{.resolution = 16, .clip = ClipConfig{.frames = 12}};
  const auto data = image_batches(clips.source(), config, {.batch = 10}, numbers);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) {
    const Batch b = data->next();
    for (int32_t number : b.at("number").view<int32_t>()) EXPECT_GE(number, 0);
  }
  const std::string log = testing::internal::GetCapturedStderr();
  for (const char* text : {"text.mp4: not a video", "damaged.mp4: frame", "truncated.mp4: it has ",
                           "short.mp4: it has 3 of 12 frames at 16 per second", "(1 so far)", "(4 so far)"})
    EXPECT_NE(log.find(text), std::string::npos) << text << "\n" << log;
  EXPECT_EQ(log.find("5 so far"), std::string::npos) << log;  // each is reported once

  for (const char* name : {"0", "1", "2", "3", "4", "5"})
    std::filesystem::remove(clips.folder / (name + std::string(".mp4")));
  std::filesystem::remove_all(clips.folder / "6");
  const auto none = image_batches(clips.source(), config, {.batch = 2}, numbers);
  try {
    none->next();
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(e.message().find("no image of a whole epoch can be decoded; the last: "), std::string::npos)
        << e.message();
  }
}

TEST(ClipBatches, AreOfOneSizeAndNumberOfFramesEach) {
  Clips clips;
  clips.add_bad();
  const ImageConfig config{.buckets = AspectBuckets::of({{32, 48, 9}, {48, 32, 9}, {32, 48, 17}, {48, 32, 17}}),
                           .clip = ClipConfig{.fps = 16}};
  const auto open = [&] {
    const ImagesInBuckets sorted = sort_into_aspect_buckets(clips.source(), config);
    EXPECT_EQ(sorted.sizes, (std::vector<ImageSize>{{48, 32, 17}, {32, 48, 9}})) << to_string(sorted.sizes[0]);
    EXPECT_EQ(sorted.records[0].size(), 2u);
    EXPECT_EQ(sorted.records[1].size(), 6u);  // the damaged clip has all its frames
    return image_batches(sorted, config, {.stream = {.seed = 2}, .batch = 2}, numbers);
  };
  const auto whole = open();
  std::vector<Batch> expected;
  std::vector<Position> cuts;
  std::set<int32_t> seen;
  for (int i = 0; i < 12; ++i) {
    cuts.push_back(whole->position());
    expected.push_back(whole->next());
    const Batch& b = expected.back();
    const bool high = b.at("pixels").dims()[1] == 17;
    EXPECT_EQ(b.at("pixels").dims(), high ? (Dims{2, 17, 48, 32, 3}) : (Dims{2, 9, 32, 48, 3}));
    for (int64_t row = 0; row < 2; ++row) {
      const int32_t number = b.at("number").view<int32_t>()[static_cast<size_t>(row)];
      seen.insert(number);
      EXPECT_EQ(high, number == 4 || number == 5);
      EXPECT_EQ(frames_of(b, row).back(), high ? 16 : 8);
    }
  }
  EXPECT_EQ(seen, (std::set<int32_t>{0, 1, 2, 3, 4, 5, 6}));
  const auto again = open();
  again->seek(cuts[5]);
  for (size_t i = 5; i < expected.size(); ++i) expect_same(expected[i], again->next());
}

TEST(ClipBatches, ComeFromColumnsOfParquet) {
  const auto source = open_source({.hf_train_files = MD_SOURCE_DIR "/tests/golden/data/files/videos.parquet",
                                   .image_column = "video",
                                   .caption_column = "caption"});
  const ImageConfig config{.buckets = AspectBuckets::of({{16, 20, 4}}), .clip = ClipConfig{.fps = 10}};
  const auto data = image_batches(source, config, {.stream = {.shuffle = false}, .batch = 3}, numbers);
  testing::internal::CaptureStderr();
  for (int epoch = 0; epoch < 2; ++epoch) {
    const Batch b = data->next();
    ASSERT_EQ(b.at("pixels").dims(), (Dims{3, 4, 16, 20, 3}));
    for (int64_t row = 0; row < 3; ++row) {
      EXPECT_EQ(b.at("number").view<int32_t>()[static_cast<size_t>(row)], row);
      EXPECT_EQ(frames_of(b, row), (std::vector<int64_t>{0, 1, 2, 3}));
    }
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("videos.parquet row 3: not a video"), std::string::npos) << log;
}

TEST(ClipBatches, LoadTogetherAsTheyComeInBatches) {
  const Clips clips;
  ImageConfig config{.buckets = AspectBuckets::of({{16, 16, 5}}), .clip = ClipConfig{.fps = 16}};
  const LoadedImages all = load_images(clips.source(), config);
  ASSERT_EQ(all.pixels.dims(), (Dims{7, 5, 16, 16, 3}));
  const auto data = image_batches(clips.source(), config, {.stream = {.shuffle = false}, .batch = 7}, numbers);
  expect_same({{"pixels", all.pixels}}, data->next());
}

TEST(ClipBatches, BeginWhereTheFolderSays) {
  const Clips clips;
  const auto source = clips.source();
  const Record record = source->read(2);
  for (const auto& [start, first] : {std::pair{0.0, 0}, {0.5, 3}, {1.0, 7}}) {  // 5 of 12 frames
    const ImageConfig config{.resolution = 32, .clip = ClipConfig{.frames = 5, .start = start}};
    std::vector<int64_t> expected(5);
    std::iota(expected.begin(), expected.end(), first);
    EXPECT_EQ(numbers_of(prepare_image(record, config, {}).arrays.at("pixels"), kFirst + std::stoi(record.caption)),
              expected)
        << start;
  }
}

TEST(ClipBatches, SettingsThatClipsDoNotHaveAreRefused) {
  const Clips clips;
  EXPECT_THROW(image_batches(clips.source(), {.mask = MaskFrom::alpha, .clip = ClipConfig{}}, {}, numbers), Error);
  EXPECT_THROW(image_batches(clips.source(), {.clip = ClipConfig{.frames = 0}}, {}, numbers), Error);
  EXPECT_THROW(load_images(clips.source(), {.clip = ClipConfig{.random_start = true}}), Error);
  const auto synthetic = open_source({.dataset_type = "synthetic", .resolution = 16});
  EXPECT_THROW(image_batches(synthetic, {.resolution = 16, .clip = ClipConfig{}}, {}, numbers)->next(), Error);
}

}  // namespace
}  // namespace md
