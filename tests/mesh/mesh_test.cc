// Every mesh gives the results of one device, and each device holds only its part of the state.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <ostream>
#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "tests/mesh/mesh_step.h"

namespace md {
namespace {

struct Sizes {
  const char* name;
  int64_t data, fsdp, context, tensor;
  double held;  // largest fraction of parameters and moments on one device
  const char* attention = "dot_product";
  int64_t fsdp_batch = 1;
  bool filters_before_channels = false;  // convolution weights have the memory layout of a TPU
  int64_t batch = 8;
};
void PrintTo(const Sizes& s, std::ostream* os) { *os << s.name; }

MeshConfig config(const Sizes& s) {
  MeshConfig c;
  c.ici_data_parallelism = s.data;
  c.ici_fsdp_parallelism = s.fsdp;
  c.ici_fsdp_batch_parallelism = s.fsdp_batch;
  c.ici_context_parallelism = s.context;
  c.ici_tensor_parallelism = s.tensor;
  return c;
}

/// The rules with which the reference runs each model.
AxisRules rules_of(const MeshConfig& mesh, MeshModel model) {
  ShardingKeys keys;
  if (model == MeshModel::wan) keys.logical_axis_rules = {kWanAxisRules};
  if (model == MeshModel::flux || model == MeshModel::qwen_image) keys.logical_axis_rules = {kFluxAxisRules};
  if (model == MeshModel::flux2) keys.logical_axis_rules = {kFlux2AxisRules};
  if (model == MeshModel::z_image) keys.logical_axis_rules = {kZImageAxisRules};
  return AxisRules::make(keys, mesh.axes(), model != MeshModel::unet);
}

/// Two steps on this mesh; compiled and run once per process.
const MeshRun& run_of(const Sizes& s, MeshModel model = MeshModel::unet) {
  static std::map<std::tuple<std::string, MeshModel, int64_t>, MeshRun> runs;
  const std::tuple key{std::string(s.name), model, s.batch};
  auto it = runs.find(key);
  if (it == runs.end()) {
    const int64_t devices = s.data * s.fsdp * s.fsdp_batch * s.context * s.tensor;
    it = runs.emplace(key, run_on(Devices::open("cpu", devices, config(s)), rules_of(config(s), model), 2, model,
                                  s.attention, s.filters_before_channels, s.batch))
             .first;
  }
  return it->second;
}

constexpr Sizes kOne{"One", 1, 1, 1, 1, 1.0};
constexpr Sizes kMixed{"Data2Fsdp2Tensor2", 2, 2, 1, 2, 0.7};

/// ‖a − b‖ / ‖b‖.
double relative_error(const HostArray& a, const HostArray& b) {
  const auto x = a.to_doubles(), y = b.to_doubles();
  double difference = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) difference += (x[i] - y[i]) * (x[i] - y[i]), size += y[i] * y[i];
  return std::sqrt(difference / std::max(size, 1e-30));
}

constexpr Sizes kData{"Data8", 8, 1, 1, 1, 1.0}, kFsdp{"Fsdp4FsdpBatch2", 1, 4, 1, 1, 0.5, "flash", 2};

/// Bytes per step of collectives of this kind; expects that all of them run along `axes`.
double bytes_of(const MeshRun& run, const std::string& kind, const std::vector<std::string>& axes) {
  double bytes = 0;
  for (const CollectiveSum& c : run.collectives) {
    if (c.kind != kind) continue;
    EXPECT_EQ(c.axes, axes) << to_string(c) << ": " << largest(c, 3);
    bytes += c.bytes;
  }
  return bytes;
}

/// For a mesh that splits the batch only, or the weights too. A missing annotation would show here: an activation would
/// be gathered, or a weight gathered twice.
void expect_gradients_summed_once_and_split_weights_gathered_once(const MeshRun& run,
                                                                  const std::vector<std::string>& axes) {
  double weights = 0, split = 0;
  for (const auto& [name, bytes] : run.bytes) {
    if (!name.starts_with("unet/")) continue;
    weights += static_cast<double>(bytes);
    if (run.bytes_per_device.at(name) < bytes) split += static_cast<double>(bytes);
  }
  EXPECT_NEAR(bytes_of(run, "all-reduce", axes) / weights, 1, 0.01);
  EXPECT_NEAR(bytes_of(run, "all-gather", axes) / weights, split / weights, 0.01);
  for (const CollectiveSum& c : run.collectives)
    EXPECT_TRUE(c.kind == "all-reduce" || c.kind == "all-gather") << to_string(c) << ": " << largest(c, 3);
}

void expect_result_of_one_device(const Sizes& sizes, MeshModel model) {
  Sizes one = kOne;
  one.batch = sizes.batch;
  const MeshRun &expected = run_of(one, model), &run = run_of(sizes, model);
  EXPECT_NEAR(run.loss, expected.loss, 1e-5 * expected.loss);
  ASSERT_EQ(run.state.size(), expected.state.size());
  double worst = 0;
  std::string where;
  int64_t whole = 0, held = 0;
  for (const auto& [name, value] : run.state) {
    // Moments are gradients, in which terms cancel; the tight bound holds for parameters.
    const double error = relative_error(value, expected.state.at(name));
    EXPECT_LE(error, name.starts_with("adam_") ? 1e-4 : 1e-5) << name;
    if (!name.starts_with("adam_") && error > worst) worst = error, where = name;
    whole += run.bytes.at(name);
    held += run.bytes_per_device.at(name);
    if (name.starts_with("adam_")) {
      const std::string parameter = name.substr(name.find('/') + 1);
      EXPECT_EQ(run.bytes_per_device.at(name), run.bytes_per_device.at(parameter)) << name;
    }
  }
  for (const CollectiveSum& c : run.collectives) std::printf("  %s\n", to_string(c).c_str());
  std::printf("  worst parameter %s %.2g, one device holds %.3f of the state\n", where.c_str(), worst,
              static_cast<double>(held) / static_cast<double>(whole));
  EXPECT_LE(static_cast<double>(held) / static_cast<double>(whole), sizes.held);
}

class MeshTest : public testing::TestWithParam<Sizes> {};
// S0-1, S0-101, S1-1, S1-7, S1-12, S1-22, S1-24, S1-38, S3-20…22, S4-2, S4-66…68, P-21
TEST_P(MeshTest, GivesTheLossAndParametersOfOneDevice) {
  expect_result_of_one_device(GetParam(), MeshModel::unet);
  const MeshRun& run = run_of(GetParam());
  EXPECT_EQ(run.bytes_per_device.at("sample") * 8, run.bytes.at("sample"));
  if (GetParam().name == kData.name) expect_gradients_summed_once_and_split_weights_gathered_once(run, {"data"});
  if (GetParam().name == kFsdp.name)
    expect_gradients_summed_once_and_split_weights_gathered_once(run, {"fsdp", "fsdp_batch"});
}

INSTANTIATE_TEST_SUITE_P(EightDevices, MeshTest,
                         testing::Values(kData, kFsdp, Sizes{"Tensor2Data4", 4, 1, 1, 2, 0.9},
                                         Sizes{"Context2Data4", 4, 1, 2, 1, 1.0}, kMixed,
                                         Sizes{"WindowsFirst", 2, 2, 1, 2, 0.7, "dot_product", 1, true}),
                         [](const auto& info) { return info.param.name; });

/// A batch of 2 on data 2 × fsdp 4: fsdp splits sequences.
constexpr Sizes kFractional{"FractionalBatch", 2, 4, 1, 1, 0.4, "flash", 1, false, 2};

class WanMeshTest : public testing::TestWithParam<Sizes> {};
// S0-87, S0-88, S1-20, S1-43, S2-70, S2-72, S2-73, P-21
TEST_P(WanMeshTest, GivesTheLossAndParametersOfOneDevice) { expect_result_of_one_device(GetParam(), MeshModel::wan); }

INSTANTIATE_TEST_SUITE_P(EightDevices, WanMeshTest,
                         testing::Values(kFractional, Sizes{"Data2Context4", 2, 1, 4, 1, 0.5, "ring"},
                                         Sizes{"Fsdp2Context2Tensor2", 1, 2, 2, 2, 0.3, "ulysses"}),
                         [](const auto& info) { return info.param.name; });

class FluxMeshTest : public testing::TestWithParam<Sizes> {};
// S1-41, S1-42
TEST_P(FluxMeshTest, GivesTheLossAndParametersOfOneDevice) { expect_result_of_one_device(GetParam(), MeshModel::flux); }

INSTANTIATE_TEST_SUITE_P(EightDevices, FluxMeshTest,
                         testing::Values(kFractional, Sizes{"Data2Fsdp4", 2, 4, 1, 1, 0.3},
                                         Sizes{"Fsdp2Context2Tensor2", 1, 2, 2, 2, 0.3, "ring"}),
                         [](const auto& info) { return info.param.name; });

// With a reference image.
class Flux2MeshTest : public testing::TestWithParam<Sizes> {};
TEST_P(Flux2MeshTest, GivesTheLossAndParametersOfOneDevice) {
  expect_result_of_one_device(GetParam(), MeshModel::flux2);
}

INSTANTIATE_TEST_SUITE_P(EightDevices, Flux2MeshTest,
                         testing::Values(Sizes{"Data2Fsdp4", 2, 4, 1, 1, 0.3},
                                         Sizes{"Fsdp2Context2Tensor2", 1, 2, 2, 2, 0.3},
                                         Sizes{"Context4Tensor2Ring", 1, 1, 4, 2, 0.6, "ring"}),
                         [](const auto& info) { return info.param.name; });

// Texts of eight lengths, known to the devices that share a sequence.
class ZImageMeshTest : public testing::TestWithParam<Sizes> {};
TEST_P(ZImageMeshTest, GivesTheLossAndParametersOfOneDevice) {
  expect_result_of_one_device(GetParam(), MeshModel::z_image);
}

INSTANTIATE_TEST_SUITE_P(EightDevices, ZImageMeshTest,
                         testing::Values(Sizes{"Data2Fsdp4", 2, 4, 1, 1, 0.3},
                                         Sizes{"Fsdp2Context2Tensor2", 1, 2, 2, 2, 0.3},
                                         Sizes{"Context4Tensor2Ring", 1, 1, 4, 2, 0.6, "ring"}),
                         [](const auto& info) { return info.param.name; });

class QwenImageMeshTest : public testing::TestWithParam<Sizes> {};
TEST_P(QwenImageMeshTest, GivesTheLossAndParametersOfOneDevice) {
  expect_result_of_one_device(GetParam(), MeshModel::qwen_image);
}

INSTANTIATE_TEST_SUITE_P(EightDevices, QwenImageMeshTest,
                         testing::Values(Sizes{"Data2Fsdp4", 2, 4, 1, 1, 0.3},
                                         Sizes{"Fsdp2Context2Tensor2", 1, 2, 2, 2, 0.3},
                                         Sizes{"Context4Tensor2Ring", 1, 1, 4, 2, 0.6, "ring"}),
                         [](const auto& info) { return info.param.name; });

// S1-34
TEST(MeshSizes, ThatDoNotFitTheDevicesAreRefused) {
  try {
    Devices::open("cpu", 8, config({"Data3", 3, 1, 1, 1, 1}));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(std::string(e.what()).find("Number of devices per slice 8 does not match"), std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace md
