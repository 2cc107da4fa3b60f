// The profiler extension of the C API. Its headers are not installed; the layouts are those of XLA's
// pjrt_c_api_profiler_extension.h and profiler_c_api.h, version 1.
#include "maxdiffusion/pjrt/profiler.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstddef>

#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/profile_options.pb.h"

namespace md::pjrt {
namespace {

struct ErrorArgs {
  size_t struct_size;
  void* priv;
  void* error;
  const char* message;  // the other arguments of message() are only results
  size_t message_size;
};
struct CreateArgs {
  size_t struct_size;
  const char* options;  // a ProfileOptions message; of an empty one XLA traces neither host nor device
  size_t options_size;
  void* profiler;
};
struct ProfilerArgs {
  size_t struct_size;
  void* profiler;
};
struct CollectArgs {
  size_t struct_size;
  void* profiler;
  uint8_t* buffer;
  size_t buffer_size;
};

struct ProfilerApi {
  size_t struct_size;
  void* priv;
  void (*error_destroy)(ErrorArgs*);
  void (*error_message)(ErrorArgs*);
  void* error_get_code;
  void* (*create)(CreateArgs*);
  void* (*destroy)(ProfilerArgs*);
  void* (*start)(ProfilerArgs*);
  void* (*stop)(ProfilerArgs*);
  void* (*collect_data)(CollectArgs*);
};
struct ProfilerExtension {
  PJRT_Extension_Base base;
  const ProfilerApi* api;
};

/// The message of an owned error, which is freed; empty if there is none.
std::string error_message(const ProfilerApi& api, void* error) {
  if (!error) return "";
  ErrorArgs args{sizeof(ErrorArgs), nullptr, error, nullptr, 0};
  api.error_message(&args);
  const std::string words(args.message, args.message_size);
  args.struct_size = offsetof(ErrorArgs, message);
  api.error_destroy(&args);
  return words.empty() ? "no reason given" : words;
}

/// Without the zero byte that the CUDA plugin puts after a message and counts; a message does not have it as a field.
std::string without_terminator(std::string message) {
  if (message.empty() || message.back() != '\0') return message;
  google::protobuf::io::CodedInputStream fields(reinterpret_cast<const uint8_t*>(message.data()),
                                                static_cast<int>(message.size()));
  uint32_t tag = 1;
  while (tag && fields.CurrentPosition() + 1 < static_cast<int>(message.size())) {
    tag = fields.ReadTag();
    if (!google::protobuf::internal::WireFormatLite::SkipField(&fields, tag)) return message;
  }
  if (fields.CurrentPosition() + 1 == static_cast<int>(message.size())) message.pop_back();
  return message;
}

}  // namespace

struct Profiler::Impl {
  const ProfilerApi& api;
  void* handle;
  std::string plugin;

  void call(void* error, const char* what) const {
    if (const std::string words = error_message(api, error); !words.empty())
      fail(Code::device, "profiler of plugin '{}', {}: {}", plugin, what, words);
  }
};

Profiler::Profiler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::unique_ptr<Profiler> Profiler::start(const Client& client) {
  const auto* extension =
      reinterpret_cast<const ProfilerExtension*>(find_extension(client.api(), PJRT_Extension_Type_Profiler));
  if (!extension || !extension->api) return nullptr;
  auto impl = std::make_unique<Impl>(Impl{*extension->api, nullptr, client.plugin().path()});
  proto::ProfileOptions options;
  options.set_version(1);
  options.set_host_tracer_level(2);  // what XLA's runtime does; 1: less, 3: each of its operations
  options.set_device_tracer_level(1);
  options.set_enable_hlo_proto(true);
  const std::string bytes = options.SerializeAsString();
  CreateArgs args{sizeof(CreateArgs), bytes.data(), bytes.size(), nullptr};
  impl->call(impl->api.create(&args), "create");
  impl->handle = args.profiler;
  std::unique_ptr<Profiler> p(new Profiler(std::move(impl)));
  ProfilerArgs start{sizeof(ProfilerArgs), p->impl_->handle};
  p->impl_->call(p->impl_->api.start(&start), "start");
  return p;
}

Profiler::~Profiler() {
  ProfilerArgs args{sizeof(ProfilerArgs), impl_->handle};
  error_message(impl_->api, impl_->api.destroy(&args));
}

std::string Profiler::stop() {
  ProfilerArgs args{sizeof(ProfilerArgs), impl_->handle};
  impl_->call(impl_->api.stop(&args), "stop");
  // Plugins return their own buffer or, if there is none, its size.
  CollectArgs collect{sizeof(CollectArgs), impl_->handle, nullptr, 0};
  impl_->call(impl_->api.collect_data(&collect), "collect");
  if (collect.buffer) return without_terminator({reinterpret_cast<const char*>(collect.buffer), collect.buffer_size});
  std::string bytes(collect.buffer_size, '\0');
  collect.buffer = reinterpret_cast<uint8_t*>(bytes.data());
  if (!bytes.empty()) impl_->call(impl_->api.collect_data(&collect), "collect");
  return without_terminator(std::move(bytes));
}

}  // namespace md::pjrt
