#include "maxdiffusion/base/shape.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

TEST(DType, NamesReadBack) {
  for (int i = 0; i <= static_cast<int>(DType::f64); ++i) {
    auto t = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(to_string(t)), t);
    EXPECT_EQ(is_float(t) + is_integer(t) + (t == DType::pred), 1) << to_string(t);
  }
  EXPECT_EQ(parse_dtype("bfloat16"), DType::bf16);
  EXPECT_EQ(parse_dtype("float32"), DType::f32);
  EXPECT_EQ(mlir_name(DType::u32), "ui32");
  EXPECT_EQ(size_of(DType::f64), 8u);
  EXPECT_TRUE(is_unsigned(DType::u8));
  EXPECT_FALSE(is_unsigned(DType::s64));
}

TEST(DType, UnknownNameListsTheKnown) {
  try {
    parse_dtype("float12");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(e.message().find("dtype is 'float12'; expected one of: float"), std::string::npos) << e.message();
  }
}

TEST(Shape, AxesCountFromBothEnds) {
  Shape s{DType::bf16, {2, 77, 768}};
  EXPECT_EQ(s.dim(0), 2);
  EXPECT_EQ(s.dim(-1), 768);
  EXPECT_EQ(s.dim(-3), 2);
  EXPECT_THROW(s.dim(3), Error);
  EXPECT_THROW(s.dim(-4), Error);
  EXPECT_EQ(normalize_axis(-1, 4), 3);
  EXPECT_THROW(normalize_axis(0, 0), Error);
}

TEST(Shape, SizesAndTexts) {
  Shape s{DType::bf16, {2, 77, 768}};
  EXPECT_EQ(s.elements(), 2 * 77 * 768);
  EXPECT_EQ(s.bytes(), 2 * 2 * 77 * 768);
  EXPECT_EQ(to_string(s), "bf16[2,77,768]");
  EXPECT_EQ(mlir_type(s), "tensor<2x77x768xbf16>");
  Shape scalar{DType::f32, {}};
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_EQ(to_string(scalar), "f32[]");
  EXPECT_EQ(mlir_type(scalar), "tensor<f32>");
  EXPECT_EQ((Shape{DType::f32, {3, 0}}).elements(), 0);
}

}  // namespace
}  // namespace md
