#include <fmt/format.h>

#include <fstream>
#include <thread>

#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/ops/conv.h"
#include "maxdiffusion/ops/elementwise.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

struct Case {
  Dims x, w;
  ConvOptions options = {};
  double tolerance = 2e-6;  // sums of up to 4,608 products in f32
};
ConvOptions window(Dims stride, Dims low, Dims high) {
  return {.stride = std::move(stride), .pad_low = std::move(low), .pad_high = std::move(high)};
}

class Convolution : public testing::TestWithParam<Case> {};

TEST_P(Convolution, AgreesWithTheCompilersOwnInF64) {
  const Case& c = GetParam();
  expect_agreement([&](const std::vector<Tensor>& in) { return std::vector{conv(in[0], in[1], c.options)}; },
                   {normal({DType::f32, c.x}, 1), normal({DType::f32, c.w}, 2)}, c.tolerance,
                   {"md_convolution", "md_convolution_input_grad", "md_convolution_weight_grad"});
}

const ConvOptions kSame = window({1, 1}, {1, 1}, {1, 1}), kDown = window({2, 2}, {1, 1}, {1, 1});

INSTANTIATE_TEST_SUITE_P(
    Sizes, Convolution,
    testing::Values(Case{{8, 16, 16, 32}, {32, 32, 3, 3}, kSame},   // several images per thread
                    Case{{3, 5, 7, 4}, {6, 4, 3, 3}, kSame},        // odd sizes
                    Case{{1, 64, 64, 16}, {24, 16, 3, 3}, kSame},   // one image: split by rows
                    Case{{1, 2, 2, 512}, {512, 512, 3, 3}, kSame},  // weights larger than the rest
                    Case{{1, 1, 9, 8}, {8, 8, 3, 3}, kSame},        // one row cannot be split
                    Case{{2, 17, 12, 8}, {16, 8, 3, 3}, kDown},     // one row too many for the stride
                    Case{{1, 17, 16, 8}, {16, 8, 3, 3}, kDown},     // the same, split by rows
                    Case{{1, 16, 16, 8}, {8, 8, 3, 3}, window({2, 2}, {0, 0}, {1, 1})},       // the autoencoder's
                    Case{{1, 12, 9, 3}, {5, 3, 1, 2}, window({3, 2}, {0, 1}, {0, 0})},        // unused rows
                    Case{{1, 32, 32, 3}, {64, 3, 16, 16}, window({16, 16}, {0, 0}, {0, 0})},  // patches
                    Case{{2, 6, 5, 24}, {192, 24, 3, 3}, kSame},  // groups of output channels
                    Case{{5, 8, 8, 4}, {320, 4, 3, 3}, kSame}));

// Causal padding with zeros before the first frame, as in video models, and other windows.
const ConvOptions kCausal = window({1, 1, 1}, {2, 1, 1}, {0, 1, 1}), kValid = window({1, 1, 1}, {0, 1, 1}, {0, 1, 1});

INSTANTIATE_TEST_SUITE_P(
    Videos, Convolution,
    testing::Values(
        Case{{1, 4, 16, 12, 32}, {32, 32, 3, 3, 3}, kCausal},  // one video: split by rows
        Case{{3, 5, 7, 5, 4}, {6, 4, 3, 3, 3}, kCausal},       // odd sizes
        Case{{1, 1, 9, 8, 16}, {24, 16, 3, 3, 3}, kCausal},    // one frame after two of zeros
        Case{{1, 3, 33, 8, 16}, {16, 16, 3, 3, 3}, kValid},    // one frame of three
        Case{{2, 6, 6, 4, 3}, {8, 3, 3, 3, 3}, kValid},
        Case{{1, 3, 4, 6, 16}, {128, 16, 3, 3, 3}, kCausal},                                // groups of output channels
        Case{{1, 4, 1, 6, 8}, {8, 8, 3, 3, 3}, kCausal},                                    // one row cannot be split
        Case{{1, 5, 10, 6, 8}, {16, 8, 3, 1, 1}, window({1, 1, 1}, {2, 0, 0}, {0, 0, 0})},  // over time
        Case{{1, 7, 10, 6, 8}, {8, 8, 3, 1, 1}, window({2, 1, 1}, {0, 0, 0}, {0, 0, 0})},   // halving it
        Case{{1, 6, 10, 6, 8}, {8, 8, 3, 1, 1}, window({2, 1, 1}, {0, 0, 0}, {0, 0, 0})},   // an unused frame
        Case{{2, 5, 12, 9, 3}, {5, 3, 2, 1, 2}, window({2, 3, 2}, {1, 0, 1}, {0, 0, 0})},   // unused rows
        Case{{1, 3, 8, 12, 4}, {16, 4, 1, 2, 2}, window({1, 2, 2}, {0, 0, 0}, {0, 0, 0})},  // frames are images
        Case{{1, 4, 8, 12, 4}, {16, 4, 2, 2, 2}, window({2, 2, 2}, {0, 0, 0}, {0, 0, 0})}));  // patches

TEST(ConvolutionInBf16, IsWidenedOrTakenAsItIs) {
  for (const Case& c :
       {Case{{2, 9, 8, 16}, {8, 16, 3, 3}, kSame}, Case{{3, 5, 7, 4}, {6, 4, 3, 3}, kSame},
        Case{{1, 64, 20, 16}, {24, 16, 3, 3}, kSame}, Case{{1, 17, 16, 8}, {16, 8, 3, 3}, kDown},
        Case{{1, 4, 16, 12, 32}, {32, 32, 3, 3, 3}, kCausal}, Case{{3, 5, 7, 5, 4}, {6, 4, 3, 3, 3}, kCausal},
        Case{{1, 3, 33, 8, 16}, {16, 16, 3, 3, 3}, kValid}, Case{{2, 6, 5, 48}, {128, 48, 3, 3}, kSame},
        Case{{1, 3, 4, 6, 16}, {128, 16, 3, 3, 3}, kCausal},
        // Frames that are copied in parts.
        Case{{1, 3, 1024, 1408, 2}, {2, 2, 2, 3, 1}, window({1, 1, 1}, {1, 1, 0}, {0, 1, 0})}})
    for (bool as_it_is : ways_of_bf16())
      expect_agreement([&](const std::vector<Tensor>& in) { return std::vector{conv(in[0], in[1], c.options)}; },
                       {normal({DType::bf16, c.x}, 1), normal({DType::bf16, c.w}, 2)}, 4e-3,
                       {"md_convolution", "md_convolution_input_grad", "md_convolution_weight_grad"}, as_it_is);
}

// bf16 layers over f32 weights: the kernel rounds the weights, and their gradient stays unrounded.
TEST(ConvolutionInGraphs, ReadsWeightsAndLeavesGradientsInF32) {
  auto layer = [](const std::vector<Tensor>& in) {
    return std::vector{conv(in[0], cast(in[1], in[0].dtype()), kSame)};
  };
  for (int64_t channels : {32, 128}) {
    const std::vector<HostArray> xs = {normal({DType::bf16, {2, 9, 8, 16}}, 1),
                                       normal({DType::f32, {channels, 16, 3, 3}}, 2)},
                                 dys = {normal({DType::bf16, {2, 9, 8, channels}}, 3)};
    const auto expected =
        outputs_and_gradients(layer, {xs[0].cast(DType::f64), xs[1].cast(DType::f64)}, {dys[0].cast(DType::f64)}, {});
    for (bool as_they_are : ways_of_bf16()) {
      const auto found = outputs_and_gradients(layer, xs, dys, {.callable = true, .bf16_products = as_they_are},
                                               {"md_convolution", "md_convolution_input_grad"});
      EXPECT_LE(relative_error(found[0], expected[0]), 4e-3);
      EXPECT_LE(relative_error(found[1], expected[1]), 4e-3) << "of x";
      EXPECT_LE(relative_error(found[2], expected[2]), 2e-6) << "of w";
    }
  }
}

// A thread copies parts of a frame, in f32. Copies of whole frames take 300 MB or more for each thread here.
TEST(ConvolutionInBf16, CopiesPartsOfLargeFrames) {
  const Shape frames{DType::bf16, {1, 3, 768, 768, 32}};
  GraphOptions options = one_device().graph_options();
  options.cpu_kernels = {.callable = true};
  Graph graph(options);
  const Tensor x = graph.input("x", frames), w = graph.input("w", {DType::bf16, {32, 32, 3, 1, 1}});
  graph.output("y", conv(x, w, window({1, 1, 1}, {2, 0, 0}, {0, 0, 0})));
  ASSERT_NE(to_stablehlo(graph).find("\"md_convolution\""), std::string::npos);
  const std::vector<HostArray> in = {HostArray(frames), HostArray(w.shape())};
  std::ofstream("/proc/self/clear_refs") << 5;  // VmHWM is VmRSS
  const int64_t before = status_bytes("VmRSS");
  evaluate(one_device(), graph, in);
  const int64_t threads = std::thread::hardware_concurrency(),
                copies = int64_t{8} << 23;  // those of kCopied floats, two layouts
  EXPECT_LT(status_bytes("VmHWM") - before, 4 * frames.bytes() + threads * copies);
}

}  // namespace
}  // namespace md
