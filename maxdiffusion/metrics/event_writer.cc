// Event files are TFRecords of Event messages. Source: TensorBoard's event_file_writer.
#include "maxdiffusion/metrics/event_writer.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/this_machine.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/media/gif.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/metrics/event.pb.h"
#include "maxdiffusion/storage/tfrecord.h"

namespace md {
namespace {

constexpr size_t kFlushBytes = 1 << 20;
constexpr double kFlushSeconds = 5;
constexpr int kDataClassTensor = 2, kTypeString = 7, kColorspaceRgb = 3;

std::string file_name() {
  static std::atomic<int> count = 0;
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  return fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<int64_t>(seconds_since_1970()), host,
                     ::getpid(), count++);
}

}  // namespace

struct EventWriter::Impl {
  std::mutex mutex;
  FileWriter file;
  std::string waiting;
  double flushed_at = seconds_since_1970();

  explicit Impl(const std::string& path) : file(path) {}

  void flush_locked() {
    flushed_at = seconds_since_1970();
    if (waiting.empty()) return;
    std::string out = std::exchange(waiting, {});  // not retried: a partial record corrupts the file
    file.write(out.data(), out.size());
  }

  void add_image(const std::string& tag, std::string encoded, int64_t height, int64_t width, int64_t step) {
    event::Event e;
    auto* v = e.mutable_summary()->add_value();
    v->set_tag(tag);
    v->mutable_image()->set_height(static_cast<int32_t>(height));
    v->mutable_image()->set_width(static_cast<int32_t>(width));
    v->mutable_image()->set_colorspace(kColorspaceRgb);
    v->mutable_image()->set_encoded_image_string(std::move(encoded));
    add(e, step);
  }

  void add(event::Event& e, int64_t step) {
    e.set_wall_time(seconds_since_1970());
    e.set_step(step);
    const std::string body = e.SerializeAsString();
    std::lock_guard lock(mutex);
    append_tfrecord(waiting, body);
    if (waiting.size() > kFlushBytes || seconds_since_1970() - flushed_at > kFlushSeconds) flush_locked();
  }
};

EventWriter::EventWriter(const std::string& folder, int64_t resumed_from) {
  make_folders(folder);
  impl_ = std::make_unique<Impl>(folder + "/" + file_name());
  event::Event file_version;
  file_version.set_file_version("brain.Event:2");
  impl_->add(file_version, 0);
  if (resumed_from > 0) {
    event::Event start;
    start.mutable_session_log()->set_status(event::SessionLog::START);
    impl_->add(start, resumed_from + 1);
  }
  text("maxdiffusion_version", version());
  flush();
}

EventWriter::~EventWriter() {
  try {
    flush();
  } catch (const Error& e) {
    log_warning("TensorBoard events: {}", e.what());
  }
}

void EventWriter::scalar(const std::string& tag, double value, int64_t step) {
  event::Event e;
  auto* v = e.mutable_summary()->add_value();
  v->set_tag(tag);
  v->set_simple_value(static_cast<float>(value));
  impl_->add(e, step);
}

void EventWriter::text(const std::string& tag, const std::string& value, int64_t step) {
  event::Event e;
  auto* v = e.mutable_summary()->add_value();
  v->set_tag(tag);
  v->mutable_metadata()->mutable_plugin_data()->set_plugin_name("text");
  v->mutable_metadata()->set_data_class(kDataClassTensor);
  v->mutable_tensor()->set_dtype(kTypeString);
  v->mutable_tensor()->mutable_tensor_shape()->add_dim()->set_size(1);
  v->mutable_tensor()->add_string_val(value);
  impl_->add(e, step);
}

void EventWriter::image(const std::string& tag, const HostArray& rgb, int64_t step) {
  impl_->add_image(tag, encode_png(rgb), rgb.shape().dim(-3), rgb.shape().dim(-2), step);
}

void EventWriter::video(const std::string& tag, const HostArray& frames, double fps, int64_t step) {
  impl_->add_image(tag, encode_gif(frames, fps), frames.shape().dim(-3), frames.shape().dim(-2), step);
}

void EventWriter::flush() {
  std::lock_guard lock(impl_->mutex);
  impl_->flush_locked();
}

}  // namespace md
