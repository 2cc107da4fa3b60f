#include "maxdiffusion/convert/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/models/registry.h"

namespace md {
namespace {

/// A line of /proc/self/status in MB.
double status_mb(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) * 1024 / 1e6;
  ADD_FAILURE() << "no " << name;
  return 0;
}

/// Peak growth of this process's resident memory during `f`, in MB; mapped files count.
template <class F>
double growth_mb(F&& f) {
  std::ofstream("/proc/self/clear_refs") << 5;  // resets VmHWM
  const double before = status_mb("VmRSS");
  EXPECT_LT(status_mb("VmHWM"), before + 20) << "the peak was not forgotten";
  f();
  return status_mb("VmHWM") - before;
}

TEST(Convert, TakesTheMemoryOfOneTensor) {
  TemporaryFolder t;
  make_folders(t / "vae");
  const auto config = nlohmann::json::parse(R"({"_class_name": "AutoencoderKL", "block_out_channels": [832],
      "down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"], "layers_per_block": 1})");
  write_file_atomic(t / "vae/config.json", config.dump());
  Graph g;
  ParamTable params;
  const ModelClass& model = *find_model_class("AutoencoderKL");
  model.trace(Scope(g, params, "vae", {.weights = DType::bf16}), model.read(config));
  double largest = 0, all = 0;
  ArraysToWrite arrays;
  for (const Param& p : params.params()) {
    const double mb = static_cast<double>(p.shape.bytes()) / 1e6;
    largest = std::max(largest, mb), all += mb;
    arrays[p.path] = {p.shape, [shape = p.shape] {
                        HostArray a(shape);
                        std::ranges::fill(a.mutable_view<uint16_t>(), 0x3f80);  // 1
                        return a;
                      }};
  }
  write_sharded_safetensors(t / "vae", weights_stem("vae"), arrays);
  // A second copy, or the whole file in memory, would exceed this.
  const double most = largest + 100;
  ASSERT_GT(all, 1.5 * most);
  EXPECT_LT(growth_mb([&] { convert(t / "vae", t / "half", {.dtype = "float16"}); }), most);
  EXPECT_LT(growth_mb([&] { convert(t / "half", t / "vae.safetensors", {}); }), most);
  const SafetensorsReader file = SafetensorsReader::open(t / "vae.safetensors");
  const HostArray& some = file.tensors().at("decoder.mid.block_1.conv1.weight");
  EXPECT_EQ(some.dims(), (Dims{832, 832, 3, 3}));
  EXPECT_EQ(some.dtype(), DType::f16);
  EXPECT_TRUE(std::ranges::all_of(some.view<uint16_t>(), [](uint16_t bits) { return bits == 0x3c00; }));
}

TEST(LoraSums, TakeAFewMegabytesMoreThanTheirResult) {
  const Shape shape{DType::bf16, {4096, 4096}};  // 34 MB
  Graph g;
  ParamTable params;
  params.add({.path = "w", .shape = shape, .model = "unet", .input = "unet/w"});
  HostArray weight(shape), up(Shape{DType::f32, {4096, 2}}), down(Shape{DType::f32, {2, 4096}});
  std::ranges::fill(weight.mutable_view<uint16_t>(), 0x3f80);  // 1
  std::ranges::fill(up.mutable_view<float>(), 0.5f);
  const auto quarter = [](size_t i) { return i % 4096 / 1024; };
  for (size_t i = 0; i < size_t{2} * 4096; ++i) down.mutable_view<float>()[i] = static_cast<float>(quarter(i));
  const std::vector<ScaledLora> loras = {{{.name = "file", .pairs = {{"unet", {{"w", {down, up, 2}}}}}}, 3}};
  const LoraSums sums(loras, params);
  HostArray sum;
  EXPECT_LT(growth_mb([&] { sum = sums.added("unet", "w", weight); }), 1.6 * static_cast<double>(shape.bytes()) / 1e6);
  // 1 + 3 · 2/2 · (0.5 c + 0.5 c)
  const HostArray values = sum.cast(DType::f32);
  for (size_t i : {0, 1023, 1024, 4095, 4096 * 3000 + 2048, 4096 * 4096 - 1})
    EXPECT_EQ(values.view<float>()[i], static_cast<float>(1 + 3 * quarter(i))) << i;
  EXPECT_EQ(sums.added("unet", "other", weight).data(), weight.data());
}

}  // namespace
}  // namespace md
