// Custom-call handlers: ours is called with the program's buffers, and its error reaches the caller that waits.
#include "maxdiffusion/pjrt/ffi.h"

#include <gtest/gtest.h>
#include <xla/ffi/api/ffi.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pjrt/executable.h"

namespace md::pjrt {
namespace {

namespace ffi = xla::ffi;

ffi::Error scale(float factor, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  if (x.typed_data()[0] < 0) return ffi::Error::InvalidArgument("scale: first element is negative");
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = factor * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(
    kScale, scale, ffi::Ffi::Bind().Attr<float>("factor").Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

constexpr const char* kText = R"(module @m {
  func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {
    %y = stablehlo.custom_call @md_test_scale(%x) {api_version = 4 : i32, backend_config = {factor = 2.5 : f32}} : (tensor<3xf32>) -> tensor<3xf32>
    return %y : tensor<3xf32>
  }
})";

TEST(Handlers, AreCalledAndTheirErrorsSurface) {
  auto client = Client::open("cpu");
  ASSERT_TRUE(supports_ffi_handlers(*client));
  register_ffi_handler(*client, "md_test_scale", reinterpret_cast<void*>(kScale));
  register_ffi_handler(*client, "md_test_scale", reinterpret_cast<void*>(kScale));
  auto exe = Executable::compile(*client, kText, {.device_ids = {client->devices()[0].id}, .flags = {}});
  const Shape shape{DType::f32, {3}};
  auto run = [&](const std::vector<float>& values) {
    const HostArray a = HostArray::of<float>(shape, values);
    Buffer x = client->put(client->devices()[0].id, shape, a.data(), {}, a.owner());
    auto out = exe.run({{&x}});
    HostArray y(shape);
    out[0][0].copy_to_host(y.mutable_data(), y.bytes(), 1).wait();
    return y.to_doubles();
  };
  EXPECT_EQ(run({1, 2, 4}), (std::vector<double>{2.5, 5, 10}));
  try {
    run({-1, 2, 4});
    FAIL() << "the handler's error was lost";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::device);
    EXPECT_NE(e.message().find("first element is negative"), std::string::npos) << e.message();
  }
}

TEST(Handlers, AreRefusedWhereTheyWouldNotBeFound) {
  auto client = Client::open("cpu", {}, MD_DEPS_DIR "/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so");
  EXPECT_FALSE(supports_ffi_handlers(*client));
  EXPECT_THROW(register_ffi_handler(*client, "md_test_scale", reinterpret_cast<void*>(kScale)), Error);
}

}  // namespace
}  // namespace md::pjrt
