// Clients and transfers, on both CPU plugins.
#include "maxdiffusion/pjrt/client.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/pjrt/every_cpu_plugin.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

class Clients : public EveryCpuPlugin {};
MD_ON_EVERY_CPU_PLUGIN(Clients);

/// Bytes that differ between positions. pred holds only 0 and 1.
HostArray pattern(const Shape& shape) {
  HostArray a(shape);
  std::byte* to = a.mutable_data();
  for (size_t i = 0; i < a.bytes(); ++i)
    to[i] = static_cast<std::byte>(shape.dtype == DType::pred ? i % 2 : (i * 37 + 11) % 251);
  return a;
}

HostArray back(const Buffer& b, const Shape& shape) {
  HostArray a(shape);
  b.copy_to_host(a.mutable_data(), a.bytes(), shape.rank()).wait();
  return a;
}

bool same_bytes(const HostArray& a, const HostArray& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

TEST_P(Clients, HasTheRequestedNumberOfDevices) {
  auto one = Client::open("cpu", {}, path());
  EXPECT_EQ(one->devices().size(), 1u);
  auto eight = open(8);
  ASSERT_EQ(eight->devices().size(), 8u);
  for (const Device& d : eight->devices()) {
    EXPECT_TRUE(d.addressable);
    EXPECT_EQ(d.process, eight->process_index());
    EXPECT_EQ(d.kind, "cpu");
    EXPECT_EQ(&eight->device(d.id), &d);
  }
  EXPECT_EQ(eight->platform_name(), "cpu");
  EXPECT_THROW(eight->device(12345), Error);
}

TEST_P(Clients, RoundTripsEveryElementType) {
  auto client = open();
  for (DType t : {DType::pred, DType::s8, DType::s16, DType::s32, DType::s64, DType::u8, DType::u16, DType::u32,
                  DType::u64, DType::f8e4m3fn, DType::f8e5m2, DType::bf16, DType::f16, DType::f32, DType::f64})
    for (const Dims& dims : {Dims{}, Dims{5}, Dims{3, 4, 7}, Dims{2, 0, 3}, Dims{64, 1000}}) {
      const HostArray a = pattern({t, dims});
      Buffer b = client->put(client->devices()[0].id, a.shape(), a.data(), {}, a.owner());
      EXPECT_TRUE(same_bytes(back(b, a.shape()), a)) << to_string(a.shape());
      EXPECT_GE(b.bytes_on_device(), static_cast<int64_t>(a.bytes()));
    }
}

TEST_P(Clients, PutsAWindowOfALargerArray) {
  auto client = open();
  const HostArray whole = pattern({DType::s32, {6, 8, 5}});
  const Shape shape{DType::s32, {2, 3, 5}};
  const auto* v = whole.view<int32_t>().data();
  Buffer b = client->put(client->devices()[0].id, shape, v + 170, {160, 20, 4}, whole.owner());
  const HostArray got = back(b, shape);
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t j = 0; j < 3; ++j)
      for (int64_t k = 0; k < 5; ++k)
        EXPECT_EQ(got.view<int32_t>()[static_cast<size_t>((i * 3 + j) * 5 + k)], v[(i + 4) * 40 + (j + 2) * 5 + k]);
}

TEST_P(Clients, PutsAxesInAnotherOrder) {
  auto client = open();
  const HostArray a = pattern({DType::s32, {4, 3, 5}});
  const Shape turned{DType::s32, {5, 4, 3}};
  Buffer b = client->put(client->devices()[0].id, turned, a.data(), {4, 60, 20}, a.owner());
  const HostArray got = back(b, turned);
  for (size_t k = 0; k < 5; ++k)
    for (size_t i = 0; i < 12; ++i) EXPECT_EQ(got.view<int32_t>()[k * 12 + i], a.view<int32_t>()[i * 5 + k]);
}

TEST_P(Clients, PutHoldsTheBytesUntilTheyAreCopiedAndNotLonger) {
  auto client = open();
  const Shape shape{DType::f32, {4 << 20}};
  std::weak_ptr<const void> bytes;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 4; ++i) {
    HostArray a = pattern(shape);
    bytes = a.owner();
    buffers.push_back(client->put(client->devices()[0].id, shape, a.data(), {}, a.owner()));
  }  // the arrays are destroyed: only transfers own their bytes
  const HostArray expected = pattern(shape);
  for (const Buffer& b : buffers) EXPECT_TRUE(same_bytes(back(b, shape), expected));
  for (int i = 0; i < 500 && !bytes.expired(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(bytes.expired());
}

// Weights are read from mapped files: the pages of those that are on the device would double what a process has.
TEST_P(Clients, PutReleasesThePagesOfAMappedFile) {
  auto client = open();
  const TemporaryFolder t;
  const Shape shape{DType::f32, {8 << 20}};
  const HostArray expected = pattern(shape);
  write_file_atomic(t / "weights", {reinterpret_cast<const char*>(expected.data()), expected.bytes()});
  const int64_t before = status_bytes("RssFile");
  const MappedFile m = map_file(t / "weights");
  ASSERT_EQ(std::memcmp(m.data, expected.data(), m.size), 0);
  ASSERT_GT(status_bytes("RssFile"), before + shape.bytes() / 2);
  const Buffer b = client->put(client->devices()[0].id, shape, m.data, {}, m.owner);
  EXPECT_TRUE(same_bytes(back(b, shape), expected));
  for (int i = 0; i < 500 && status_bytes("RssFile") > before + shape.bytes() / 8; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_LT(status_bytes("RssFile"), before + shape.bytes() / 8);
  EXPECT_EQ(std::memcmp(m.data, expected.data(), m.size), 0) << "they are read again";
}

TEST_P(Clients, PutOfALargeMappedArrayTakesItsMemoryOnce) {
  auto client = open();
  const TemporaryFolder t;
  const Shape shape{DType::f32, {32 << 20}};
  {
    const HostArray expected = pattern(shape);
    write_file_atomic(t / "weights", {reinterpret_cast<const char*>(expected.data()), expected.bytes()});
  }
  const MappedFile m = map_file(t / "weights");
  std::ofstream("/proc/self/clear_refs") << 5;  // VmHWM is VmRSS
  const int64_t before = status_bytes("VmRSS");
  const Buffer b = client->put(client->devices()[0].id, shape, m.data, {}, m.owner);
  b.wait();
  EXPECT_LT(status_bytes("VmHWM") - before, shape.bytes() * 5 / 4);
  EXPECT_EQ(std::memcmp(back(b, shape).data(), m.data, m.size), 0);
}

TEST(Platforms, EightBitFloatsAreKnownByDevice) {
  auto gpu = [](double capability) { return kGpuPlatform.has_float8({.compute_capability = capability}); };
  EXPECT_TRUE(gpu(9.0));
  EXPECT_TRUE(gpu(8.9));
  EXPECT_FALSE(gpu(8.0));
  auto tpu = [](const char* kind) { return kTpuPlatform.has_float8({.kind = kind}); };
  EXPECT_TRUE(tpu("TPU7x"));
  EXPECT_FALSE(tpu("TPU v5p"));
  EXPECT_FALSE(tpu("TPU v6 lite"));
  EXPECT_TRUE(kCpuPlatform.has_float8({.kind = "cpu"}));
}

TEST(Platforms, PeaksAreKnownByDeviceKind) {
  EXPECT_EQ(kTpuPlatform.peak_flops("TPU v5p", DType::bf16), 459e12);
  EXPECT_EQ(kTpuPlatform.peak_flops("TPU v5 lite", DType::bf16), 197e12);
  EXPECT_EQ(kTpuPlatform.peak_flops("TPU v6 lite", DType::bf16), 918e12);
  EXPECT_EQ(kGpuPlatform.peak_flops("NVIDIA H100 80GB HBM3", DType::bf16), 989e12);
  EXPECT_FALSE(kTpuPlatform.peak_flops("TPU v99", DType::bf16));
  EXPECT_FALSE(kCpuPlatform.peak_flops("cpu", DType::f32));
}

TEST(Platforms, WithoutTheirDevicesSaySoWithoutTheirPlugin) {
  const TemporaryFolder t;
  const auto put = [&](const std::string& file, const std::string& text = "") {
    make_folders((t / file).substr(0, (t / file).rfind('/')));
    write_file_atomic(t / file, text);
  };
  put("dev/nvidiactl");
  EXPECT_NE(kGpuPlatform.absent(t.path()).find("no NVIDIA GPU"), std::string::npos);
  put("dev/nvidia0");
  EXPECT_EQ(kGpuPlatform.absent(t.path()), "");
  for (const char* name : {"TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"})
    ::unsetenv(name);
  put("dev/vfio/vfio");
  put("dev/accel");
  put("sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n");
  put("sys/bus/pci/devices/0000:00:04.0/device", "0x0042\n");  // a network card of that cloud
  EXPECT_NE(kTpuPlatform.absent(t.path()).find("no TPU"), std::string::npos);
  put("sys/bus/pci/devices/0000:00:05.0/vendor", "0x1ae0\n");
  put("sys/bus/pci/devices/0000:00:05.0/device", "0x0063\n");
  EXPECT_EQ(kTpuPlatform.absent(t.path()), "");
  put("sys/bus/pci/devices/0000:00:05.0/device", "0x001f\n");  // a disk
  EXPECT_NE(kTpuPlatform.absent(t.path()), "");
  put("dev/vfio/0");
  EXPECT_EQ(kTpuPlatform.absent(t.path()), "");
  ::setenv("TPU_NAME", "mine", 1);
  EXPECT_EQ(kTpuPlatform.absent("/nowhere"), "");
  ::unsetenv("TPU_NAME");
}

}  // namespace
}  // namespace md::pjrt
