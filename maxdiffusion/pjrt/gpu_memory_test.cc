#include "maxdiffusion/pjrt/gpu_memory.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/test_error.h"

namespace md::pjrt {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

class GpuMemoryOptions : public testing::Test {
 protected:
  void TearDown() override {
    for (const char* name :
         {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"})
      unsetenv(name);
  }
  static float fraction(const std::vector<GpuMemory>& gpus) {
    return std::get<float>(gpu_memory_options(gpus).at("memory_fraction"));
  }
};

TEST_F(GpuMemoryOptions, TakeWhatIsFreeButAReserve) {
  EXPECT_FLOAT_EQ(fraction({{80 * kGiB, 80 * kGiB}}), 78.F / 80);                                  // 2 GiB are left
  EXPECT_FLOAT_EQ(fraction({{10 * kGiB, 12 * kGiB}}), 10.F / 12 - 0.07F);                          // 7 % are left
  EXPECT_FLOAT_EQ(fraction({{80 * kGiB, 80 * kGiB}, {60 * kGiB, 80 * kGiB}}), 60.F / 80 - 0.07F);  // one for all
  EXPECT_TRUE(gpu_memory_options({}).empty());  // without a driver XLA's default
}

TEST_F(GpuMemoryOptions, SayWhatIsFreeOfAGpuThatOthersHold) {
  const Error e = error_of([] { gpu_memory_options({{80 * kGiB, 80 * kGiB}, {2 * kGiB, 80 * kGiB}}); });
  EXPECT_EQ(e.code(), Code::out_of_memory);
  const std::string text = e.what();
  EXPECT_NE(text.find("2.00 GiB of GPU 1's 80.00 are free; other processes hold the rest"), text.npos) << text;
  EXPECT_NE(text.find("try: nvidia-smi"), text.npos) << text;
}

TEST_F(GpuMemoryOptions, AreThoseOfTheVariablesOfJax) {
  setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".25", 1);
  setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false", 1);
  setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async", 1);
  const Options options = gpu_memory_options({{1 * kGiB, 80 * kGiB}});  // sufficient, since the part is asked for
  EXPECT_EQ(options,
            (Options{{"memory_fraction", .25F}, {"preallocate", false}, {"allocator", std::string("cuda_async")}}));
  for (const char* wrong : {"0", "1.5", "half", "-1"}) {
    setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", wrong, 1);
    EXPECT_EQ(error_of([] { gpu_memory_options({}); }).code(), Code::invalid_config) << wrong;
  }
  setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1", 1);
  setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "no", 1);
  EXPECT_NE(std::string(error_of([] { gpu_memory_options({}); }).what()).find("expected one of: true, false"),
            std::string::npos);
}

}  // namespace
}  // namespace md::pjrt
