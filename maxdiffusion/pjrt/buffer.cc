// Buffers on a device, and the events of their computation and copies.
#include <numeric>
#include <utility>

#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {

Event::Event(Event&& o) noexcept : api_(o.api_), handle_(std::exchange(o.handle_, nullptr)) {}

Event& Event::operator=(Event&& o) noexcept {
  std::swap(api_, o.api_);
  std::swap(handle_, o.handle_);
  return *this;
}

Event::~Event() {
  if (!handle_) return;
  PJRT_Event_Destroy_Args args{};
  args.event = static_cast<PJRT_Event*>(handle_);
  PJRT_CALL_QUIET(api_, PJRT_Event_Destroy, args);
}

bool Event::ready() const {
  PJRT_Event_IsReady_Args args{};
  args.event = static_cast<PJRT_Event*>(handle_);
  PJRT_CALL(api_, PJRT_Event_IsReady, args);
  return args.is_ready;
}

void Event::wait() const {
  PJRT_Event_Await_Args args{};
  args.event = static_cast<PJRT_Event*>(handle_);
  PJRT_CALL(api_, PJRT_Event_Await, args);
}

namespace {

struct HostReference {
  const PJRT_Api* api;
  std::shared_ptr<const void> owner;
};

}  // namespace

void Event::keep_alive(std::shared_ptr<const void> owner) const {
  if (!handle_) return;  // already complete
  PJRT_Event_OnReady_Args args{};
  args.event = static_cast<PJRT_Event*>(handle_);
  auto reference = std::make_unique<HostReference>(HostReference{api_, std::move(owner)});
  args.user_arg = reference.get();
  args.callback = [](PJRT_Error* error, void* arg) {
    auto* k = static_cast<HostReference*>(arg);
    take_error_message(k->api, error);  // waiting for the contents returns the error
    delete k;
  };
  PJRT_CALL(api_, PJRT_Event_OnReady, args);
  static_cast<void>(reference.release());  // now owned by the callback
}

Buffer::Buffer(Buffer&& o) noexcept : client_(o.client_), handle_(std::exchange(o.handle_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& o) noexcept {
  std::swap(client_, o.client_);
  std::swap(handle_, o.handle_);
  return *this;
}

Buffer::~Buffer() {
  if (!handle_) return;
  PJRT_Buffer_Destroy_Args args{};
  args.buffer = static_cast<PJRT_Buffer*>(handle_);
  PJRT_CALL_QUIET(client_->api(), PJRT_Buffer_Destroy, args);
}

int64_t Buffer::bytes_on_device() const {
  PJRT_Buffer_OnDeviceSizeInBytes_Args args{};
  args.buffer = static_cast<PJRT_Buffer*>(handle_);
  PJRT_CALL(client_->api(), PJRT_Buffer_OnDeviceSizeInBytes, args);
  return static_cast<int64_t>(args.on_device_size_in_bytes);
}

uintptr_t Buffer::address() const {
  PJRT_Buffer_UnsafePointer_Args args{};
  args.buffer = static_cast<PJRT_Buffer*>(handle_);
  PJRT_CALL(client_->api(), PJRT_Buffer_UnsafePointer, args);
  return args.buffer_pointer;
}

bool Buffer::deleted() const {
  PJRT_Buffer_IsDeleted_Args args{};
  args.buffer = static_cast<PJRT_Buffer*>(handle_);
  PJRT_CALL(client_->api(), PJRT_Buffer_IsDeleted, args);
  return args.is_deleted;
}

Event Buffer::ready() const {
  PJRT_Buffer_ReadyEvent_Args args{};
  args.buffer = static_cast<PJRT_Buffer*>(handle_);
  PJRT_CALL(client_->api(), PJRT_Buffer_ReadyEvent, args);
  return Event(client_->api(), args.event);
}

void Buffer::wait() const { ready().wait(); }

Event Buffer::copy_to_host(void* to, size_t bytes, int64_t rank) const {
  // Devices may tile or transpose; request the host's layout explicitly.
  std::vector<int64_t> minor_to_major(static_cast<size_t>(rank));
  std::iota(minor_to_major.rbegin(), minor_to_major.rend(), 0);
  PJRT_Buffer_MemoryLayout layout{};
  layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
  layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  layout.tiled.minor_to_major = minor_to_major.data();
  layout.tiled.minor_to_major_size = minor_to_major.size();
  PJRT_Buffer_ToHostBuffer_Args args{};
  args.src = static_cast<PJRT_Buffer*>(handle_);
  args.host_layout = &layout;
  args.dst = to;
  args.dst_size = bytes;
  PJRT_CALL(client_->api(), PJRT_Buffer_ToHostBuffer, args);
  Event done(client_->api(), args.event);
  done.keep_alive(client_->track());
  return done;
}

}  // namespace md::pjrt
