// H.264 in MP4. Source: FFmpeg's documentation of libavcodec and of the options of libx264 and the mov muxer.
#include <cstdio>
#include <cstring>

#include "maxdiffusion/media/libav/libav.h"

namespace md {
namespace {

/// The file while it is written. To move the index to the front at the end, the muxer opens the file again.
struct File {
  std::string bytes;
  struct Place {
    File* file;
    int64_t at = 0;
  };
  static int write(void* opaque, uint8_t* from, int size) {
    auto& p = *static_cast<Place*>(opaque);
    const auto end = static_cast<size_t>(p.at + size);
    if (p.file->bytes.size() < end) p.file->bytes.resize(end);
    std::memcpy(p.file->bytes.data() + p.at, from, static_cast<size_t>(size));
    p.at += size;
    return size;
  }
  static int read(void* opaque, uint8_t* to, int size) {
    auto& p = *static_cast<Place*>(opaque);
    const int64_t n = std::min<int64_t>(size, std::ssize(p.file->bytes) - p.at);
    if (n <= 0) return AVERROR_EOF;
    std::memcpy(to, p.file->bytes.data() + p.at, static_cast<size_t>(n));
    p.at += n;
    return static_cast<int>(n);
  }
  static int64_t seek(void* opaque, int64_t offset, int whence) {
    auto& p = *static_cast<Place*>(opaque);
    const int64_t size = std::ssize(p.file->bytes);
    if (whence & AVSEEK_SIZE) return size;
    return p.at = offset + (whence == SEEK_CUR ? p.at : whence == SEEK_END ? size : 0);
  }
};

constexpr int kBuffer = 1 << 16;

IoPtr io_of(File::Place& place, bool writes) {
  return IoPtr(avio_alloc_context(static_cast<uint8_t*>(av_malloc(kBuffer)), kBuffer, writes, &place, File::read,
                                  File::write, File::seek));
}

int open_again(AVFormatContext* format, AVIOContext** io, const char*, int, AVDictionary**) {
  *io = io_of(*static_cast<File::Place*>(format->opaque), false).release();
  return *io ? 0 : AVERROR(ENOMEM);
}
int close_again(AVFormatContext*, AVIOContext* io) {
  free_io(io);
  return 0;
}

}  // namespace

std::string encode_mp4_bytes(const uint8_t* rgb, int64_t frames, ImageSize size, const Mp4Config& config,
                             const std::string& name) {
  clear_ffmpeg_log();
  const auto w = static_cast<int>(size.width), h = static_cast<int>(size.height);
  const AVCodec* encoder = avcodec_find_encoder_by_name("libx264");
  check(encoder != nullptr, Code::io, "{}: this libavcodec has no encoder libx264", name);
  const auto memory = [&](bool allocated) {
    check(allocated, Code::out_of_memory, "{}: no memory for the encoder", name);
  };

  File file;
  File::Place to{&file}, again{&file};
  const IoPtr io = io_of(to, true);
  AVFormatContext* muxer = nullptr;
  require(avformat_alloc_output_context2(&muxer, nullptr, "mp4", nullptr), name, "the muxer");
  const OutputPtr format(muxer);
  memory(io != nullptr);
  format->pb = io.get();
  format->flags |= AVFMT_FLAG_BITEXACT | AVFMT_FLAG_CUSTOM_IO;
  format->opaque = &again;
  format->io_open = open_again;
  format->io_close2 = close_again;
  format->url = av_strdup("");

  const CodecPtr codec(avcodec_alloc_context3(encoder));
  memory(codec != nullptr);
  codec->width = w, codec->height = h;
  codec->pix_fmt = config.full_colour ? AV_PIX_FMT_YUV444P : AV_PIX_FMT_YUV420P;
  codec->framerate = av_d2q(config.fps, 1'000'000);
  codec->time_base = av_inv_q(codec->framerate);
  codec->color_range = AVCOL_RANGE_MPEG;
  codec->colorspace = AVCOL_SPC_BT709;
  codec->color_primaries = AVCOL_PRI_BT709;
  codec->color_trc = AVCOL_TRC_BT709;
  codec->chroma_sample_location = AVCHROMA_LOC_LEFT;
  codec->sample_aspect_ratio = {1, 1};
  codec->thread_count = config.threads;
  codec->flags |= AV_CODEC_FLAG_GLOBAL_HEADER | AV_CODEC_FLAG_BITEXACT;
  av_opt_set_double(codec->priv_data, "crf", config.quality, 0);
  require(avcodec_open2(codec.get(), encoder, nullptr), name, "the encoder");

  AVStream* stream = avformat_new_stream(format.get(), nullptr);
  memory(stream != nullptr);
  require(avcodec_parameters_from_context(stream->codecpar, codec.get()), name, "the encoder");
  stream->time_base = codec->time_base;
  stream->avg_frame_rate = codec->framerate;
  AVDictionary* options = nullptr;
  av_dict_set(&options, "movflags", "+faststart", 0);
  const int headed = avformat_write_header(format.get(), &options);
  av_dict_free(&options);
  require(headed, name, "the file's header");

  const ScalerPtr scaler(sws_getContext(w, h, AV_PIX_FMT_RGB24, w, h, codec->pix_fmt,
                                        SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INP | SWS_BITEXACT, nullptr,
                                        nullptr, nullptr));
  const FramePtr frame(av_frame_alloc());
  const PacketPtr packet(av_packet_alloc());
  memory(scaler && frame && packet);
  sws_setColorspaceDetails(scaler.get(), sws_getCoefficients(SWS_CS_DEFAULT), 1, sws_getCoefficients(SWS_CS_ITU709), 0,
                           0, 1 << 16, 1 << 16);
  frame->width = w, frame->height = h, frame->format = codec->pix_fmt;
  require(av_frame_get_buffer(frame.get(), 0), name, "memory of a frame");
  frame->color_range = codec->color_range;
  for (int64_t i = 0; i <= frames; ++i) {
    if (i < frames) {
      require(av_frame_make_writable(frame.get()), name, "memory of a frame");
      const uint8_t* from[] = {rgb + i * w * h * 3};
      const int strides[] = {w * 3};
      require(sws_scale(scaler.get(), from, strides, 0, h, frame->data, frame->linesize), name, "colours");
      frame->pts = i;
    }
    require(avcodec_send_frame(codec.get(), i < frames ? frame.get() : nullptr), name, "encoding");
    for (;;) {
      const int r = avcodec_receive_packet(codec.get(), packet.get());
      if (r == AVERROR(EAGAIN) || r == AVERROR_EOF) break;
      require(r, name, "encoding");
      packet->duration = 1;
      packet->stream_index = stream->index;
      av_packet_rescale_ts(packet.get(), codec->time_base, stream->time_base);
      require(av_interleaved_write_frame(format.get(), packet.get()), name, "writing");
    }
  }
  require(av_write_trailer(format.get()), name, "the file's index");
  avio_flush(io.get());
  return std::move(file.bytes);
}

}  // namespace md
