// Compared with scikit-image's values (tools/golden/similarity.py).
#include "maxdiffusion/metrics/similarity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

HostArray made(const Dims& dims, uint64_t seed) {
  HostArray a(Shape{DType::u8, dims});
  auto v = a.mutable_view<uint8_t>();
  for (uint64_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<uint8_t>((i * i * 7 + i * (31 + seed) + (i / 5) * 13 * seed) % 251);
  return a;
}

// S2-84
TEST(Similarity, OfImagesAndVideosEqualsScikitImage) {
  struct Case {
    Dims dims;
    double near_ssim, near_psnr, far_ssim, far_psnr;
  };
  for (const Case& c :
       {Case{{12, 9, 3}, 0.8192240165907935, 15.439199591462652, -0.06226483489620257, 7.422436575491908},
        Case{{9, 10, 8, 3}, 0.7541998890599536, 13.827279996496678, 0.002865479754718249, 7.882324760976004}}) {
    const HostArray a = made(c.dims, 0), mask = made(c.dims, 2), other = made(c.dims, 5), far = made(c.dims, 3);
    HostArray near(a.shape());
    for (size_t i = 0; i < a.view<uint8_t>().size(); ++i)
      near.mutable_view<uint8_t>()[i] = (mask.view<uint8_t>()[i] < 60 ? other : a).view<uint8_t>()[i];
    EXPECT_NEAR(structural_similarity(a, a), 1, 1e-12);
    EXPECT_TRUE(std::isinf(peak_signal_to_noise(a, a)));
    EXPECT_NEAR(structural_similarity(a, near), c.near_ssim, 1e-10);
    EXPECT_NEAR(peak_signal_to_noise(a, near), c.near_psnr, 1e-10);
    EXPECT_NEAR(structural_similarity(a, far), c.far_ssim, 1e-10);
    EXPECT_NEAR(peak_signal_to_noise(a, far), c.far_psnr, 1e-10);
  }
}

TEST(Similarity, IsOfArraysOfOneSize) {
  EXPECT_NEAR(structural_similarity(made({2, 4, 4, 3}, 0), made({2, 4, 4, 3}, 0)), 1, 1e-12);
  EXPECT_THROW(structural_similarity(made({8, 8, 3}, 0), made({8, 9, 3}, 0)), Error);
  EXPECT_THROW(peak_signal_to_noise(HostArray(Shape{DType::f32, {8, 8, 3}}), HostArray(Shape{DType::f32, {8, 8, 3}})),
               Error);
}

}  // namespace
}  // namespace md
