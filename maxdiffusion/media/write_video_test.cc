#include "maxdiffusion/media/write_video.h"

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
}
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/media/decode_video.h"
#include "maxdiffusion/media/gif.h"
#include "maxdiffusion/media/test_videos.h"

namespace md {
namespace {

/// A smooth video in saturated colours that move.
HostArray colours(int64_t frames, int64_t height, int64_t width) {
  HostArray a(Shape{DType::u8, {frames, height, width, 3}});
  uint8_t* to = a.mutable_view<uint8_t>().data();
  for (int64_t i = 0; i < frames; ++i)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x) {
        *to++ = static_cast<uint8_t>(x * 255 / width);
        *to++ = static_cast<uint8_t>(y * 255 / height);
        *to++ = static_cast<uint8_t>((x + 2 * i) * 200 / (width + 2 * frames));
      }
  return a;
}
double mean_distance(const HostArray& a, const HostArray& b) {
  if (a.dims() != b.dims()) return 256;
  double sum = 0;
  for (size_t i = 0; i < a.bytes(); ++i) sum += std::abs(a.view<uint8_t>()[i] - b.view<uint8_t>()[i]);
  return sum / static_cast<double>(a.bytes());
}

TEST(WriteVideo, Mp4IsWhatPlaysEverywhere) {
  const TemporaryFolder folder;
  const std::string file = folder / "it.mp4";
  write_mp4(file, colours(20, 48, 80), {.fps = 23.976});
  const std::string bytes = read_file(file);
  EXPECT_EQ(bytes.substr(4, 4), "ftyp");
  EXPECT_LT(bytes.find("moov"), bytes.find("mdat"));
  AVFormatContext* format = nullptr;
  ASSERT_EQ(avformat_open_input(&format, file.c_str(), nullptr, nullptr), 0);
  ASSERT_GE(avformat_find_stream_info(format, nullptr), 0);
  ASSERT_EQ(format->nb_streams, 1u);
  const AVStream& s = *format->streams[0];
  EXPECT_EQ(s.codecpar->codec_id, AV_CODEC_ID_H264);
  EXPECT_EQ(s.codecpar->format, AV_PIX_FMT_YUV420P);
  EXPECT_EQ(s.codecpar->color_space, AVCOL_SPC_BT709);
  EXPECT_EQ(s.codecpar->color_primaries, AVCOL_PRI_BT709);
  EXPECT_EQ(s.codecpar->color_trc, AVCOL_TRC_BT709);
  EXPECT_EQ(s.codecpar->color_range, AVCOL_RANGE_MPEG);
  EXPECT_EQ(s.nb_frames, 20);
  EXPECT_NEAR(av_q2d(s.avg_frame_rate), 23.976, 1e-3);
  EXPECT_NEAR(static_cast<double>(format->duration) / AV_TIME_BASE, 20 / 23.976, 0.01);
  avformat_close_input(&format);
}

TEST(WriteVideo, ColoursComeBack) {
  const HostArray frames = colours(9, 64, 64);
  const auto back = [&](const Mp4Config& c) { return decode_video(encode_mp4(frames, c, "it"), "it"); };
  EXPECT_LT(mean_distance(back({}), frames), 2.5);
  EXPECT_LT(mean_distance(back({.quality = 0, .full_colour = true}), frames), 0.8);
  EXPECT_GT(mean_distance(back({.quality = 45}), frames), 4);
}

TEST(WriteVideo, OddSidesBecomeEvenByRepeatingTheEdge) {
  const HostArray frames = grey_frames(3, 31, 45, 40);
  const HostArray found = decode_video(encode_mp4(frames, {.quality = 0}, "it"), "it");
  ASSERT_EQ(found.dims(), (Dims{3, 32, 46, 3}));
  const auto level = [&](int64_t y, int64_t x) {
    return int{found.view<uint8_t>()[static_cast<size_t>((y * 46 + x) * 3)]};
  };
  for (const auto& [y, x] : {std::pair{31, 45}, {31, 20}, {5, 45}}) EXPECT_NEAR(level(y, x), level(30, 44), 2);
}

TEST(WriteVideo, OneThreadGivesTheSameBytesEachTime) {
  const HostArray frames = colours(9, 64, 64);
  EXPECT_EQ(encode_mp4(frames, {.threads = 1}, "it"), encode_mp4(frames, {.threads = 1}, "it"));
}

TEST(WriteVideo, AFullDiskIsAnErrorAndLeavesTheOldFile) {
  const TemporaryFolder folder;
  const std::string file = folder / "it.mp4";
  write_mp4(file, grey_frames(2, 32, 32));
  const std::string before = read_file(file);
  set_write_hook([](const std::string& path, size_t) { fail(Code::io, "write '{}': No space left on device", path); });
  EXPECT_THROW(write_mp4(file, grey_frames(5, 32, 32)), Error);
  set_write_hook(nullptr);
  EXPECT_EQ(read_file(file), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  EXPECT_THROW(write_mp4(folder / "no/such/folder/it.mp4", grey_frames(2, 32, 32)), Error);
}

TEST(WriteVideo, SettingsOutOfRangeAreRefused) {
  const HostArray frames = grey_frames(2, 32, 32);
  EXPECT_THROW(encode_mp4(frames, {.fps = 0}, "it"), Error);
  EXPECT_THROW(encode_mp4(frames, {.quality = 52}, "it"), Error);
  EXPECT_THROW(encode_mp4(HostArray(Shape{DType::u8, {0, 32, 32, 3}}), {}, "it"), Error);
  EXPECT_THROW(encode_mp4(HostArray(Shape{DType::f32, {2, 32, 32, 3}}), {}, "it"), Error);
}

TEST(EncodeGif, KeepsFewColoursAsTheyAreAndManyNearly) {
  const HostArray few = grey_frames(5, 20, 31);  // ten colours, so long LZW strings
  HostArray back = decode_video(encode_gif(few, 10), "few.gif");
  ASSERT_EQ(back.dims(), few.dims());
  EXPECT_EQ(mean_distance(back, few), 0);
  const std::vector<double> times = open_video(encode_gif(few, 10), "few.gif", 1)->times();
  EXPECT_NEAR(times.at(4), 0.4, 1e-6);
  // More colours than a palette holds, and more strings than there are codes.
  const HostArray many = colours(3, 120, 160);
  back = decode_video(encode_gif(many, 8), "many.gif");
  ASSERT_EQ(back.dims(), many.dims());
  EXPECT_LT(mean_distance(back, many), 6);
  HostArray noise(Shape{DType::u8, {1, 90, 91, 3}});
  uint32_t bits = 1;
  for (uint8_t& v : noise.mutable_view<uint8_t>())
    v = static_cast<uint8_t>((bits = bits * 1664525 + 1013904223) >> 30 << 6);
  EXPECT_EQ(mean_distance(decode_video(encode_gif(noise, 8), "noise.gif"), noise), 0);
}

}  // namespace
}  // namespace md
