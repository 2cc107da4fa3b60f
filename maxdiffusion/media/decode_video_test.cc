#include "maxdiffusion/media/decode_video.h"

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/display.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
}
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/test_videos.h"
#include "maxdiffusion/media/write_video.h"

namespace md {
namespace {

using Numbers = std::vector<int64_t>;

void ok(int result) {
  char text[AV_ERROR_MAX_STRING_SIZE];
  if (result < 0) fail(Code::internal, "the test's encoder: {}", av_make_error_string(text, sizeof(text), result));
}

struct Encoding {
  const char* codec = "libvpx-vp9";
  AVPixelFormat format = AV_PIX_FMT_YUV420P;
  int fps = 16, degrees = 0;
  AVRational pixel = {1, 1};
};

/// Writes clips one after the other into one file whose format follows from its name, with FFmpeg's encoders and
/// muxers.
void encode(const std::string& path, const std::vector<HostArray>& clips, const Encoding& e) {
  AVFormatContext* format = nullptr;
  ok(avformat_alloc_output_context2(&format, nullptr, nullptr, path.c_str()));
  ok(avio_open(&format->pb, path.c_str(), AVIO_FLAG_WRITE));
  AVStream* stream = avformat_new_stream(format, nullptr);
  AVPacket* packet = av_packet_alloc();
  int64_t number = 0;
  for (size_t part = 0; part < clips.size(); ++part) {
    const HostArray& frames = clips[part];
    const int h = static_cast<int>(frames.dims()[1]), w = static_cast<int>(frames.dims()[2]);
    AVCodecContext* codec = avcodec_alloc_context3(avcodec_find_encoder_by_name(e.codec));
    codec->width = w, codec->height = h, codec->pix_fmt = e.format, codec->time_base = {1, e.fps};
    codec->framerate = {e.fps, 1}, codec->sample_aspect_ratio = e.pixel, codec->gop_size = 8;
    codec->thread_count = 1, codec->bit_rate = 4'000'000;
    codec->global_quality = FF_QP2LAMBDA, codec->flags |= AV_CODEC_FLAG_QSCALE;
    if (format->oformat->flags & AVFMT_GLOBALHEADER && part == 0) codec->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    av_opt_set(codec->priv_data, "crf", "4", 0);
    if (std::string_view(e.codec) == "libwebp_anim") av_opt_set(codec->priv_data, "lossless", "1", 0);
    av_opt_set(codec->priv_data, "deadline", "realtime", 0);
    ok(avcodec_open2(codec, codec->codec, nullptr));
    if (part == 0) {
      ok(avcodec_parameters_from_context(stream->codecpar, codec));
      stream->time_base = codec->time_base, stream->avg_frame_rate = codec->framerate;
      stream->sample_aspect_ratio = e.pixel;
      if (e.degrees) {
        auto* matrix =
            reinterpret_cast<int32_t*>(av_stream_new_side_data(stream, AV_PKT_DATA_DISPLAYMATRIX, sizeof(int32_t) * 9));
        av_display_rotation_set(matrix, e.degrees);
      }
      ok(avformat_write_header(format, nullptr));
    }
    SwsContext* scaler = sws_getContext(w, h, AV_PIX_FMT_RGB24, w, h, e.format, SWS_BICUBIC | SWS_ACCURATE_RND, nullptr,
                                        nullptr, nullptr);
    const int64_t before = number;
    for (int64_t i = 0; i <= frames.dims()[0]; ++i) {
      AVFrame* frame = nullptr;
      if (i < frames.dims()[0]) {
        frame = av_frame_alloc();
        frame->width = w, frame->height = h, frame->format = e.format, frame->pts = before + i;
        frame->quality = codec->global_quality;
        ok(av_frame_get_buffer(frame, 0));
        const uint8_t* from[] = {frames.view<uint8_t>().data() + i * w * h * 3};
        const int strides[] = {w * 3};
        ok(sws_scale(scaler, from, strides, 0, h, frame->data, frame->linesize));
      }
      ok(avcodec_send_frame(codec, frame));
      av_frame_free(&frame);
      while (avcodec_receive_packet(codec, packet) == 0) {
        packet->stream_index = 0;
        if (packet->duration == 0) packet->duration = 1;
        av_packet_rescale_ts(packet, codec->time_base, stream->time_base);
        ++number;
        ok(av_interleaved_write_frame(format, packet));
      }
    }
    number = before + frames.dims()[0];
    sws_freeContext(scaler);
    avcodec_free_context(&codec);
  }
  ok(av_write_trailer(format));
  av_packet_free(&packet);
  ok(avio_closep(&format->pb));
  avformat_free_context(format);
}

/// Writes half a second of silence as AAC.
void encode_sound(const std::string& path) {
  AVFormatContext* format = nullptr;
  ok(avformat_alloc_output_context2(&format, nullptr, nullptr, path.c_str()));
  ok(avio_open(&format->pb, path.c_str(), AVIO_FLAG_WRITE));
  AVStream* stream = avformat_new_stream(format, nullptr);
  AVCodecContext* codec = avcodec_alloc_context3(avcodec_find_encoder(AV_CODEC_ID_AAC));
  codec->sample_rate = 8000, codec->sample_fmt = AV_SAMPLE_FMT_FLTP, codec->time_base = {1, 8000};
  av_channel_layout_default(&codec->ch_layout, 1);
  codec->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
  ok(avcodec_open2(codec, codec->codec, nullptr));
  ok(avcodec_parameters_from_context(stream->codecpar, codec));
  ok(avformat_write_header(format, nullptr));
  AVPacket* packet = av_packet_alloc();
  for (int i = 0; i <= 4; ++i) {
    AVFrame* frame = nullptr;
    if (i < 4) {
      frame = av_frame_alloc();
      frame->nb_samples = codec->frame_size, frame->format = codec->sample_fmt,
      frame->pts = int64_t{i} * codec->frame_size;
      frame->sample_rate = codec->sample_rate;
      av_channel_layout_default(&frame->ch_layout, 1);
      ok(av_frame_get_buffer(frame, 0));
      std::memset(frame->data[0], 0, static_cast<size_t>(frame->linesize[0]));
    }
    ok(avcodec_send_frame(codec, frame));
    av_frame_free(&frame);
    while (avcodec_receive_packet(codec, packet) == 0) {
      av_packet_rescale_ts(packet, codec->time_base, stream->time_base);
      ok(av_interleaved_write_frame(format, packet));
    }
  }
  ok(av_write_trailer(format));
  av_packet_free(&packet);
  avcodec_free_context(&codec);
  ok(avio_closep(&format->pb));
  avformat_free_context(format);
}

/// The largest absolute difference of two byte arrays; 256 if their shapes differ.
int distance(const HostArray& a, const HostArray& b) {
  if (a.dims() != b.dims()) return 256;
  int most = 0;
  for (size_t i = 0; i < a.bytes(); ++i) most = std::max(most, std::abs(a.view<uint8_t>()[i] - b.view<uint8_t>()[i]));
  return most;
}

std::string error_of(const std::string& file, const FrameTimes& times = {}) {
  try {
    decode_video(file, times);
    return "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_EQ(e.message().find(file), 0u) << e.message();
    return e.message();
  }
}

TEST(DecodeVideo, EveryFormatGivesTheFramesThatWereEncoded) {
  const TemporaryFolder folder;
  const HostArray frames = grey_frames(17, 48, 64, 40);
  struct Case {
    const char* name;
    Encoding encoding;
    int far;
  };
  for (const auto& [name, encoding, far] :
       {Case{"vp9.webm", {.codec = "libvpx-vp9"}, 3}, Case{"vp8.webm", {.codec = "libvpx"}, 6},
        Case{"h264.mkv", {.codec = "libx264"}, 3}, Case{"h264.mov", {.codec = "libx264"}, 3},
        Case{"mpeg4.avi", {.codec = "mpeg4"}, 12}, Case{"mpeg4.mp4", {.codec = "mpeg4"}, 12},
        Case{"it.gif", {.codec = "gif", .format = AV_PIX_FMT_RGB8, .fps = 20}, 90},  // 256 colours, dithered
        Case{"it.webp", {.codec = "libwebp_anim", .format = AV_PIX_FMT_BGRA, .fps = 20}, 0}}) {
    const std::string file = folder / name;
    encode(file, {frames}, encoding);
    const HostArray found = decode_video(file);
    EXPECT_LE(distance(found, frames), far) << name << " " << to_string(found.shape());
    // The number of frames is exact although files round times to milliseconds or hundredths of a second.
    EXPECT_EQ(decode_video(file, {.fps = static_cast<double>(encoding.fps)}).dims()[0], 17) << name;
    const std::string bytes = read_file(file);
    EXPECT_EQ(frames_in(open_video(bytes, name, 1)->times(), encoding.fps), 17) << name;
  }
}

TEST(DecodeVideo, FramesAreTheNearestInTime) {
  const TemporaryFolder folder;
  const std::string file = folder / "it.mp4";
  write_mp4(file, grey_frames(36, 32, 32), {.fps = 24, .quality = 0});
  const auto numbers = [&](const FrameTimes& t) { return numbers_of(decode_video(file, t)); };
  Numbers all(36);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  EXPECT_EQ(numbers({}), all);
  EXPECT_EQ(numbers({.fps = 24}), all);
  EXPECT_EQ(numbers({.fps = 8}), (Numbers{0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33}));
  EXPECT_EQ(numbers({.fps = 8, .start = 0.25, .most = 3}), (Numbers{6, 9, 12}));
  EXPECT_EQ(numbers({.fps = 16, .most = 5}), (Numbers{0, 1, 3, 4, 6}));  // 1.5 and 4.5 round down
  EXPECT_EQ(numbers({.fps = 60, .start = 1.4}), (Numbers{34, 34, 34, 35, 35, 35}));
  EXPECT_EQ(numbers({.start = 1.4}), (Numbers{34, 35}));
  EXPECT_EQ(numbers({.start = 1.4, .most = 1}), (Numbers{34}));
  EXPECT_EQ(error_of(file, {.fps = 24, .start = 1.5}), file + ": there is no frame 1.5 seconds after the first");
  EXPECT_THROW(decode_video(file, {.fps = -1}), Error);
  EXPECT_THROW(decode_video(file, {.start = NAN}), Error);
}

TEST(DecodeVideo, FramesInCountsWhatEachFrameFinds) {
  const TemporaryFolder folder;
  for (int stored : {1, 2, 7, 36})
    for (double rate : {8.0, 16.0, 23.976, 30.0}) {
      const std::string bytes = encode_mp4(grey_frames(stored, 16, 16), {.fps = rate, .threads = 1}, "it");
      const auto times = open_video(bytes, "it", 1)->times();
      for (double fps : {0.0, 5.0, 8.0, 15.0, 16.0, 24.0, 47.952, 60.0})
        for (double start : {0.0, 0.1, 0.3}) {
          int64_t n = 0;
          const auto video = open_video(bytes, "it", 1);
          EXPECT_EQ(each_frame(*video, {.fps = fps, .start = start}, [&](const VideoFrame&) { ++n; }), n);
          EXPECT_EQ(frames_in(times, fps, start), n) << stored << " at " << rate << " to " << fps << " from " << start;
        }
      EXPECT_EQ(frames_in(times, rate), stored);
    }
}

TEST(DecodeVideo, StartingLateGivesTheBytesThatDecodingAllGives) {
  const TemporaryFolder folder;
  HostArray frames(Shape{DType::u8, {160, 32, 48, 3}});
  for (size_t i = 0; i < frames.bytes(); ++i)
    frames.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i / 7 * 13 + i / 4608 * 5);
  for (const char* codec : {"libx264", "libvpx-vp9", "mpeg4"}) {
    const std::string file = folder / (std::string(codec) + (codec[0] == 'm' ? ".avi" : ".mkv"));
    encode(file, {frames}, {.codec = codec});
    const HostArray all = decode_video(file);
    ASSERT_EQ(all.dims()[0], 160);
    for (int64_t first : {1, 15, 63, 64, 65, 130, 159}) {
      const HostArray found = decode_video(file, {.fps = 16, .start = static_cast<double>(first) / 16, .most = 4});
      EXPECT_EQ(distance(found, rows(all, first, std::min<int64_t>(4, 160 - first))), 0) << codec << " " << first;
    }
  }
}

TEST(DecodeVideo, WhatIsTurnedOrHasWidePixelsComesUpright) {
  const TemporaryFolder folder;
  const HostArray frames = grey_frames(3, 32, 48, 40);
  const std::string plain = folder / "plain.mov";
  encode(plain, {frames}, {.codec = "libx264"});
  const auto bright = [](const HostArray& a, int64_t y, int64_t x) {  // finds the brighter quarter
    return a.view<uint8_t>()[static_cast<size_t>((y * a.dims()[2] + x) * 3)] > 55;
  };
  struct Case {
    int degrees;
    int64_t height, width, y, x;
  };
  for (const Case& c :
       {Case{0, 32, 48, 4, 4}, Case{90, 48, 32, 44, 4}, Case{180, 32, 48, 28, 44}, Case{-90, 48, 32, 4, 28}}) {
    // FFmpeg's display matrix holds the clockwise angle in degrees by which a player rotates the stored image back.
    encode(folder / "turned.mov", {frames}, {.codec = "libx264", .degrees = -c.degrees});
    const HostArray found = decode_video(folder / "turned.mov");
    ASSERT_EQ(found.dims(), (Dims{3, c.height, c.width, 3})) << c.degrees;
    for (int64_t y : {int64_t{4}, c.height - 4})
      for (int64_t x : {int64_t{4}, c.width - 4}) EXPECT_EQ(bright(found, y, x), y == c.y && x == c.x) << c.degrees;
  }
  encode(folder / "wide.mov", {frames}, {.codec = "libx264", .pixel = {4, 3}});
  EXPECT_EQ(decode_video(folder / "wide.mov").dims(), (Dims{3, 32, 64, 3}));
}

TEST(DecodeVideo, BadInputIsNamedWithTheReason) {
  const TemporaryFolder folder;
  HostArray noise(Shape{DType::u8, {30, 64, 64, 3}});
  for (size_t i = 0; i < noise.bytes(); ++i)
    noise.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i / 9 * 13 + i / 4608 * 5);
  const std::string good = folder / "good.mp4", bad = folder / "bad.mp4";
  write_mp4(good, noise, {.fps = 10});
  const std::string bytes = read_file(good);
  const HostArray whole = decode_video(good);

  write_file_atomic(bad, "This is a text and no video.\nffconcat version 1.0\nfile good.mp4\n");
  EXPECT_NE(error_of(bad).find("not a video (mp4, mov, mkv, webm, avi or gif)"), std::string::npos) << error_of(bad);
  write_file_atomic(bad, "ffconcat version 1.0\nfile good.mp4\n");
  EXPECT_NE(error_of(bad).find("not a video"), std::string::npos) << error_of(bad);
  write_file_atomic(bad, "");
  EXPECT_NE(error_of(bad).find("empty"), std::string::npos);

  encode_sound(folder / "sound.m4a");
  EXPECT_EQ(error_of(folder / "sound.m4a"), folder / "sound.m4a" + ": no video stream; its streams: audio");

  encode(folder / "sizes.webm", {grey_frames(5, 64, 64), grey_frames(5, 48, 64)}, {.codec = "libvpx"});
  EXPECT_NE(error_of(folder / "sizes.webm").find("the size changes: frame 5 has 64x48 pixels, those before 64x64"),
            std::string::npos)
      << error_of(folder / "sizes.webm");
  EXPECT_EQ(decode_video(folder / "sizes.webm", {.most = 5}).dims()[0], 5);  // later frames are not read

  for (size_t percent : {1, 10, 30, 50, 80, 95, 99}) {
    write_file_atomic(bad, bytes.substr(0, bytes.size() * percent / 100));
    try {
      const HostArray found = decode_video(bad);
      EXPECT_LT(found.dims()[0], 30) << percent;
      EXPECT_EQ(distance(found, rows(whole, 0, found.dims()[0])), 0) << percent;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::io);
    }
  }
}

std::string replaced(std::string bytes, const std::string& box, size_t offset, const std::string& by) {
  const size_t at = bytes.find(box);
  EXPECT_NE(at, std::string::npos) << box;
  return bytes.replace(at + offset, by.size(), by);
}

TEST(DecodeVideo, WhatTheHeaderClaimsDoesNotCount) {
  const TemporaryFolder folder;
  const std::string file = folder / "it.mp4";
  const HostArray frames = grey_frames(12, 64, 64);
  const std::string good = encode_mp4(frames, {.fps = 10, .quality = 0}, "it");
  // A duration of eight hours, in all three fields.
  std::string lies = good;
  for (const auto& [box, offset] : {std::pair{"mvhd", 20}, {"tkhd", 24}, {"mdhd", 20}})
    lies = replaced(lies, box, static_cast<size_t>(offset), std::string("\x01\x00\x00\x00", 4));
  write_file_atomic(file, lies);
  EXPECT_EQ(decode_video(file, {.fps = 10}).dims()[0], 12);
  // Sides of 65535 pixels in the container only; those of the stream count.
  write_file_atomic(file, replaced(good, "avc1", 28, "\xff\xff\xff\xff"));
  const std::string found = error_of(file);
  EXPECT_TRUE(found == "no error" || found.find("claims 65535x65535") != std::string::npos) << found;
}

TEST(DecodeVideo, DamageAnywhereIsAnErrorOrHarmless) {
  const TemporaryFolder folder;
  encode(folder / "a.webm", {grey_frames(9, 32, 32)}, {.codec = "libvpx-vp9"});
  encode(folder / "b.gif", {grey_frames(9, 32, 32)}, {.codec = "gif", .format = AV_PIX_FMT_RGB8, .fps = 20});
  encode(folder / "c.webp", {grey_frames(9, 32, 32)}, {.codec = "libwebp_anim", .format = AV_PIX_FMT_BGRA});
  write_mp4(folder / "d.mp4", grey_frames(9, 32, 32));
  uint64_t state = 1;
  int errors = 0;
  for (const char* name : {"a.webm", "b.gif", "c.webp", "d.mp4"}) {
    const std::string good = read_file(folder / name);
    for (int i = 0; i < 150; ++i) {
      std::string bytes = good;
      for (int k = 0; k < 3; ++k) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[(state >> 33) % bytes.size()] = static_cast<char>(state >> 20);
      }
      if (i % 3 == 0) bytes.resize(bytes.size() * static_cast<size_t>(i) / 150);
      try {
        decode_video(bytes, name, {.fps = 16, .most = 100}, 1);
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::io) << e.message();
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 150);
}

TEST(DecodeVideo, ImagesAreFrames) {
  const TemporaryFolder folder;
  const HostArray frames = grey_frames(4, 20, 30);
  write_frames(folder / "frames", frames);
  std::vector<Blob> images;
  for (int i = 0; i < 4; ++i) images.push_back(Blob::of(read_file(folder / fmt::format("frames/{:04}.png", i))));
  const auto video = open_image_sequence(images, "it", 8);
  EXPECT_EQ(video->size(), (ImageSize{20, 30}));
  EXPECT_EQ(frames_in(video->times(), 8), 4);
  int64_t i = 0;
  each_frame(*video, {.fps = 8}, [&](const VideoFrame& f) {
    HostArray rgb(Shape{DType::u8, {20, 30, 3}});
    f.rgb(rgb.mutable_view<uint8_t>().data());
    EXPECT_EQ(distance(rgb, without_batch(rows(frames, i++, 1))), 0);
  });
  EXPECT_EQ(i, 4);
  EXPECT_EQ(distance(decode_video(folder / "frames/0002.png"), rows(frames, 2, 1)), 0);
  images.push_back(Blob::of(encode_png(without_batch(rows(grey_frames(1, 20, 20), 0, 1)))));
  const auto other = open_image_sequence(images, "it", 8);
  EXPECT_THROW(each_frame(*other, {.fps = 8},
                          [&](const VideoFrame& f) {
                            HostArray rgb(Shape{DType::u8, {20, 30, 3}});
                            f.rgb(rgb.mutable_view<uint8_t>().data());
                          }),
               Error);
}

}  // namespace
}  // namespace md
