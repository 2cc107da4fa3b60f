// Client: devices of a plugin, and copies from the host to them.
#include "maxdiffusion/pjrt/client.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/device.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {

namespace {

/// Handles a plugin's call with a KeyValues as user_arg. Exceptions must not cross the C API: errors are returned by
/// `act`.
template <class Args>
PJRT_Error* handle_request(Args* args, const std::function<PJRT_Error*(KeyValues&, const std::string& key)>& act) {
  try {
    return act(*static_cast<KeyValues*>(args->user_arg), std::string(args->key, args->key_size));
  } catch (const std::exception& e) {
    return (*args->callback_error)(PJRT_Error_Code_INTERNAL, e.what(), std::strlen(e.what()));
  }
}

template <class Args>
PJRT_Error* give(Args* args, const std::string& value) {
  args->value = new char[value.size()];
  std::memcpy(args->value, value.data(), value.size());
  args->value_size = value.size();
  args->value_deleter_callback = [](char* bytes) { delete[] bytes; };
  return nullptr;
}

template <class Args>
PJRT_Error* refuse(Args* args, PJRT_Error_Code code, const std::string& message) {
  return (*args->callback_error)(code, message.data(), message.size());
}

PJRT_Error* put_value(PJRT_KeyValuePutCallback_Args* args) {
  return handle_request(args, [&](KeyValues& shared, const std::string& key) -> PJRT_Error* {
    shared.put(key, std::string(args->value, args->value_size));
    return nullptr;
  });
}

PJRT_Error* try_get_value(PJRT_KeyValueTryGetCallback_Args* args) {
  return handle_request(args, [&](KeyValues& shared, const std::string& key) {
    const std::optional<std::string> value = shared.get(key);
    return value ? give(args, *value)
                 : refuse(args, PJRT_Error_Code_NOT_FOUND, fmt::format("there is no value of '{}'", key));
  });
}

PJRT_Error* wait_for_value(PJRT_KeyValueGetCallback_Args* args) {
  return handle_request(args, [&](KeyValues& shared, const std::string& key) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(args->timeout_in_ms);
    for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, std::chrono::milliseconds(100))) {
      if (const std::optional<std::string> value = shared.get(key)) return give(args, *value);
      if (Clock::now() >= end)
        return refuse(args, PJRT_Error_Code_DEADLINE_EXCEEDED,
                      fmt::format("'{}' was not set within {} ms; have all processes of the run started?", key,
                                  args->timeout_in_ms));
      std::this_thread::sleep_for(pause);
    }
  });
}

void check_present(const PlatformDef& platform) {
  const char* assumed = std::getenv("MAXDIFFUSION_ASSUME_DEVICES");
  if (!platform.absent || (assumed && *assumed)) return;
  if (const std::string why = platform.absent(""); !why.empty())
    throw Error(Code::device, fmt::format("hardware: {}: {}", platform.hardware, why))
        .note("try: hardware=cpu; or, if there is one, MAXDIFFUSION_ASSUME_DEVICES=1 in the environment");
}

}  // namespace

std::shared_ptr<Client> Client::open(const std::string& hardware, const Options& options,
                                     const std::string& plugin_path, std::shared_ptr<KeyValues> shared) {
  const PlatformDef& platform = platform_for(hardware);
  if (plugin_path.empty()) check_present(platform);
  Options all = options;
  if (platform.client_options) all.merge(platform.client_options(options));
  auto plugin = Plugin::load(plugin_path.empty() ? Plugin::find(hardware) : plugin_path);
  return std::shared_ptr<Client>(new Client(std::move(plugin), platform, all, std::move(shared)));
}

Client::Client(std::shared_ptr<Plugin> plugin, const PlatformDef& platform, const Options& options,
               std::shared_ptr<KeyValues> shared)
    : plugin_(std::move(plugin)), shared_(std::move(shared)), platform_(&platform), work_(std::make_shared<Work>()) {
  const std::vector<PJRT_NamedValue> values = named_values(options);
  PJRT_Client_Create_Args create{};
  create.create_options = values.data();
  create.num_options = values.size();
  if (shared_) {
    create.kv_get_callback = wait_for_value;
    create.kv_put_callback = put_value;
    create.kv_try_get_callback = try_get_value;
    create.kv_get_user_arg = create.kv_put_user_arg = create.kv_try_get_user_arg = shared_.get();
  }
  PJRT_CALL(api(), PJRT_Client_Create, create);
  handle_ = create.client;

  PJRT_Client_PlatformName_Args name{};
  name.client = create.client;
  PJRT_CALL(api(), PJRT_Client_PlatformName, name);
  platform_name_.assign(name.platform_name, name.platform_name_size);
  PJRT_Client_PlatformVersion_Args version{};
  version.client = create.client;
  PJRT_CALL(api(), PJRT_Client_PlatformVersion, version);
  platform_version_.assign(version.platform_version, version.platform_version_size);
  PJRT_Client_ProcessIndex_Args process{};
  process.client = create.client;
  PJRT_CALL(api(), PJRT_Client_ProcessIndex, process);
  process_index_ = process.process_index;

  PJRT_Client_Devices_Args all{};
  all.client = create.client;
  PJRT_CALL(api(), PJRT_Client_Devices, all);
  for (size_t i = 0; i < all.num_devices; ++i) {
    PJRT_Device_GetDescription_Args description{};
    description.device = all.devices[i];
    PJRT_CALL(api(), PJRT_Device_GetDescription, description);
    Device d = describe(api(), description.device_description);
    PJRT_Device_IsAddressable_Args addressable{};
    addressable.device = all.devices[i];
    PJRT_CALL(api(), PJRT_Device_IsAddressable, addressable);
    d.addressable = addressable.is_addressable;
    d.handle = all.devices[i];
    devices_.push_back(std::move(d));
  }
  check(!devices_.empty(), Code::device, "plugin '{}': the client has no devices", plugin_->path());
}

struct Client::Work {
  std::mutex mutex;
  std::condition_variable none;
  int64_t pending = 0;
};

std::shared_ptr<const void> Client::track(std::shared_ptr<const void> owner) const {
  {
    std::lock_guard lock(work_->mutex);
    ++work_->pending;
  }
  struct Pending {
    std::shared_ptr<Work> work;
    std::shared_ptr<const void> owner;
    ~Pending() {
      owner.reset();
      std::lock_guard lock(work->mutex);
      if (--work->pending == 0) work->none.notify_all();
    }
  };
  return std::shared_ptr<Pending>(new Pending{work_, std::move(owner)});
}

Client::~Client() {
  // Waits, because a CPU plugin crashed when its client was destroyed before the last copy to the host was complete.
  {
    std::unique_lock lock(work_->mutex);
    work_->none.wait(lock, [&] { return work_->pending == 0; });
  }
  PJRT_Client_Destroy_Args args{};
  args.client = static_cast<PJRT_Client*>(handle_);
  PJRT_CALL_QUIET(api(), PJRT_Client_Destroy, args);
}

const Device& Client::device(int id) const {
  for (const Device& d : devices_)
    if (d.id == id) return d;
  fail(Code::device, "device {}: the client has {} devices, none with this id", id, devices_.size());
}

std::optional<DeviceMemory> Client::memory(int device_id) const {
  PJRT_Device_MemoryStats_Args args{};
  args.struct_size = PJRT_Device_MemoryStats_Args_STRUCT_SIZE;
  args.device = static_cast<PJRT_Device*>(device(device_id).handle);
  if (PJRT_Error* error = api()->PJRT_Device_MemoryStats(&args)) {  // optional in the API
    take_error_message(api(), error);
    return {};
  }
  DeviceMemory m{.in_use = args.bytes_in_use, .peak = {}, .limit = {}};
  if (args.peak_bytes_in_use_is_set) m.peak = args.peak_bytes_in_use;
  if (args.bytes_limit_is_set) m.limit = args.bytes_limit;
  return m;
}

bool Client::has_float8() const { return platform_->has_float8(devices_.front()); }

std::optional<double> Client::peak_flops(DType type) const {
  return platform_->peak_flops(devices_.front().kind, type);
}

namespace {

PJRT_Memory* pinned_host_memory(const PJRT_Api* api, const Device& device) {
  PJRT_Device_AddressableMemories_Args all{};
  all.device = static_cast<PJRT_Device*>(device.handle);
  PJRT_CALL(api, PJRT_Device_AddressableMemories, all);
  for (size_t i = 0; i < all.num_memories; ++i) {
    PJRT_Memory_Kind_Args kind{};
    kind.memory = all.memories[i];
    PJRT_CALL(api, PJRT_Memory_Kind, kind);
    if (std::string_view(kind.kind, kind.kind_size) == "pinned_host") return all.memories[i];
  }
  throw Error(Code::device,
              fmt::format("device {} ({}) has no host memory of its own (pinned_host)", device.id, device.kind))
      .note("try: blocks_to_swap=0");
}

/// `owner`, with which the bytes' pages of a mapped file are released.
std::shared_ptr<const void> releasing(std::shared_ptr<const void> owner, const void* data, int64_t bytes) {
  return {data, [owner = std::move(owner), bytes](const void* d) { release_pages(d, static_cast<size_t>(bytes)); }};
}

/// A copy of the bytes in parts, whose pages of a mapped file are released one after the other.
HostArray copied_in_parts(const Shape& shape, const void* data) {
  constexpr int64_t kPart = int64_t{4} << 20;
  HostArray copy(shape);
  const int64_t bytes = shape.bytes();
  parallel_for((bytes + kPart - 1) / kPart, [&](int64_t part, int) {
    const auto at = static_cast<size_t>(part * kPart), n = static_cast<size_t>(std::min(kPart, bytes - part * kPart));
    std::memcpy(copy.mutable_data() + at, static_cast<const std::byte*>(data) + at, n);
    release_pages(static_cast<const std::byte*>(data) + at, n);
  });
  return copy;
}

}  // namespace

Buffer Client::put(int device_id, const Shape& shape, const void* data, const std::vector<int64_t>& byte_strides,
                   std::shared_ptr<const void> owner, bool zero_copy, bool in_host_memory) const {
  constexpr int64_t kLarge = int64_t{32} << 20;
  if (platform_->memory_is_the_hosts && !zero_copy && byte_strides.empty() && shape.bytes() >= kLarge &&
      is_mapped(data, static_cast<size_t>(shape.bytes()))) {
    // The plugin would copy it whole while all pages of the file are resident.
    const HostArray copy = copied_in_parts(shape, data);
    return put(device_id, shape, copy.data(), {}, copy.owner(), true, in_host_memory);
  }
  PJRT_Client_BufferFromHostBuffer_Args args{};
  args.client = static_cast<PJRT_Client*>(handle_);
  args.data = data;
  args.type = buffer_type(shape.dtype);
  args.dims = shape.dims.data();
  args.num_dims = shape.dims.size();
  args.byte_strides = byte_strides.empty() ? nullptr : byte_strides.data();
  args.num_byte_strides = byte_strides.size();
  const bool adopted = zero_copy && platform_->memory_is_the_hosts;
  args.host_buffer_semantics =
      adopted ? PJRT_HostBufferSemantics_kMutableZeroCopy : PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes;
  if (in_host_memory)
    args.memory = pinned_host_memory(api(), device(device_id));
  else
    args.device = static_cast<PJRT_Device*>(device(device_id).handle);
  PJRT_CALL(api(), PJRT_Client_BufferFromHostBuffer, args);
  Buffer buffer(this, args.buffer);
  if (!adopted && byte_strides.empty()) owner = releasing(std::move(owner), data, shape.bytes());
  Event(api(), args.done_with_host_buffer).keep_alive(adopted ? std::move(owner) : track(std::move(owner)));
  return buffer;
}

}  // namespace md::pjrt
