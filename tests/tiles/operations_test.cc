// Each operation of tile programs in a separate program: its values on the available device, as StableHLO on CPUs and
// as a kernel on TPUs and GPUs; and compiled as a kernel for four generations of TPUs and two of GPUs.
#include <cmath>

#include "maxdiffusion/tiles/mosaic.h"
#include "tests/ops/evaluate.h"
#include "tests/tiles/programs.h"
#include "tests/tiles/triton_values.h"

namespace md {
namespace {

using tiles::Program;
using tiles::Ref;
using tiles::Tile;

constexpr int64_t kSteps = 2, kRows = 16, kColumns = 256;
const Shape kScalar{DType::s32, {}};

/// Elements of one step's blocks of both inputs, as stored on the device.
struct Blocks {
  std::vector<double> a, b;
  int64_t step;
  double A(int64_t r, int64_t c) const { return a[static_cast<size_t>((step * kRows + r) * kColumns + c)]; }
  double B(int64_t r, int64_t c) const { return b[static_cast<size_t>((step * kRows + r) * kColumns + c)]; }
};

struct Case {
  const char* name;
  std::function<Tile(Program&, Tile a, Tile b)> build;
  std::function<double(const Blocks&, int64_t row, int64_t column)> expected;
  double tolerance = 1e-5;
};

/// A scalar that differs between steps: 5, 9.
Tile number(Program& p) { return p.add(p.scalar(5), p.multiply(p.coordinate(0), p.scalar(4))); }
double of_step(const Blocks& x) { return 5.0 + 4.0 * static_cast<double>(x.step); }
Tile bf16(Program& p, Tile x) { return p.cast(x, DType::bf16); }

/// Σ of products over one axis of each operand.
double product(const Blocks& x, int64_t axis_a, int64_t axis_b, int64_t row, int64_t column) {
  double sum = 0;
  for (int64_t i = 0; i < (axis_a ? kColumns : kRows); ++i)
    sum += (axis_a ? x.A(row, i) : x.A(i, row)) * (axis_b ? x.B(column, i) : x.B(i, column));
  return sum;
}
/// Results of a B200 have at most 512 columns of 128 rows, those of other products included.
constexpr int64_t kFewColumns = 128;
Case matmul(const char* name, int64_t a, int64_t b, DType type) {
  return {name,
          [=](Program& p, Tile x, Tile y) {
            if (a == 0) x = p.slice(x, 0, kRows, 0, kFewColumns), y = p.slice(y, 0, kRows, 0, kFewColumns);
            if (a != b) y = p.transpose(y);  // so that sizes agree
            return p.matmul(p.cast(x, type), p.cast(y, type), a, b, true);
          },
          [=](const Blocks& x, int64_t r, int64_t c) { return product(x, a, a, r, c); },
          type == DType::f32 ? 1e-4 : 0.1};
}

std::vector<Case> cases() {
  using B = const Blocks&;
  return {
      {"constant", [](Program& p, Tile a, Tile) { return p.constant(2.5, a.shape); },
       [](B, int64_t, int64_t) { return 2.5; }},
      {"coordinate",
       [](Program& p, Tile a, Tile b) {
         return p.select(p.less(p.iota(kRows, kColumns, 1), p.broadcast(number(p), kRows, kColumns)), a, b);
       },
       [](B x, int64_t r, int64_t c) { return static_cast<double>(c) < of_step(x) ? x.A(r, c) : x.B(r, c); }},
      {"add", [](Program& p, Tile a, Tile b) { return p.add(a, b); },
       [](B x, int64_t r, int64_t c) { return x.A(r, c) + x.B(r, c); }},
      {"subtract", [](Program& p, Tile a, Tile b) { return p.subtract(a, b); },
       [](B x, int64_t r, int64_t c) { return x.A(r, c) - x.B(r, c); }},
      {"multiply", [](Program& p, Tile a, Tile b) { return p.multiply(a, b); },
       [](B x, int64_t r, int64_t c) { return x.A(r, c) * x.B(r, c); }},
      {"divide", [](Program& p, Tile a, Tile b) { return p.divide(a, p.add(b, p.constant(3, b.shape))); },
       [](B x, int64_t r, int64_t c) { return x.A(r, c) / (x.B(r, c) + 3); }, 1e-4},
      {"maximum", [](Program& p, Tile a, Tile b) { return p.maximum(a, b); },
       [](B x, int64_t r, int64_t c) { return std::max(x.A(r, c), x.B(r, c)); }},
      {"minimum", [](Program& p, Tile a, Tile b) { return p.minimum(a, b); },
       [](B x, int64_t r, int64_t c) { return std::min(x.A(r, c), x.B(r, c)); }},
      {"minimum_of_scalars",
       [](Program& p, Tile a, Tile b) {
         Tile n = p.minimum(p.maximum(number(p), p.scalar(6)), p.scalar(8));  // 6, 8
         return p.select(p.equal(p.iota(kRows, kColumns, 0), p.broadcast(n, kRows, kColumns)), a, b);
       },
       [](B x, int64_t r, int64_t c) { return r == (x.step ? 8 : 6) ? x.A(r, c) : x.B(r, c); }},
      {"exp2", [](Program& p, Tile a, Tile) { return p.exp2(a); },
       [](B x, int64_t r, int64_t c) { return std::exp2(x.A(r, c)); }, 1e-4},
      {"log2", [](Program& p, Tile a, Tile) { return p.log2(p.add(a, p.constant(1.5, a.shape))); },
       [](B x, int64_t r, int64_t c) { return std::log2(x.A(r, c) + 1.5); }, 1e-4},
      {"cast", [](Program& p, Tile a, Tile) { return p.cast(bf16(p, a), DType::f32); },
       [](B x, int64_t r, int64_t c) { return x.A(r, c); }, 4e-3},
      {"max_of_rows", [](Program& p, Tile a, Tile) { return p.max_of(a, 1); },
       [](B x, int64_t r, int64_t) {
         double most = x.A(r, 0);
         for (int64_t i = 1; i < kColumns; ++i) most = std::max(most, x.A(r, i));
         return most;
       }},
      {"max_of_columns", [](Program& p, Tile a, Tile) { return p.max_of(a, 0); },
       [](B x, int64_t, int64_t c) {
         double most = x.A(0, c);
         for (int64_t i = 1; i < kRows; ++i) most = std::max(most, x.A(i, c));
         return most;
       }},
      {"sum_of_rows", [](Program& p, Tile a, Tile) { return p.sum_of(a, 1); },
       [](B x, int64_t r, int64_t) {
         double sum = 0;
         for (int64_t i = 0; i < kColumns; ++i) sum += x.A(r, i);
         return sum;
       },
       1e-4},
      {"sum_of_columns", [](Program& p, Tile a, Tile) { return p.sum_of(a, 0); },
       [](B x, int64_t, int64_t c) {
         double sum = 0;
         for (int64_t i = 0; i < kRows; ++i) sum += x.A(i, c);
         return sum;
       },
       1e-4},
      {"broadcast_of_a_row",
       [](Program& p, Tile a, Tile) { return p.broadcast(p.slice(a, 0, 1, 0, kColumns), 8, kColumns); },
       [](B x, int64_t, int64_t c) { return x.A(0, c); }},
      {"broadcast_of_a_column",
       [](Program& p, Tile a, Tile) { return p.broadcast(p.slice(a, 0, kRows, 7, 1), kRows, 128); },
       [](B x, int64_t r, int64_t) { return x.A(r, 7); }},
      {"select_of_both",
       [](Program& p, Tile a, Tile b) {
         Tile row = p.iota(kRows, kColumns, 0), column = p.iota(kRows, kColumns, 1),
              few = p.less(row, p.broadcast(p.scalar(3), kRows, kColumns));
         return p.select(p.both(few, p.less(row, column)), a, b);
       },
       [](B x, int64_t r, int64_t c) { return r < 3 && r < c ? x.A(r, c) : x.B(r, c); }},
      {"concatenate",
       [](Program& p, Tile a, Tile b) {
         return p.concatenate({a, b}, 1);
       },
       [](B x, int64_t r, int64_t c) { return c < kColumns ? x.A(r, c) : x.B(r, c - kColumns); }},
      {"concatenate_of_half_registers",
       [](Program& p, Tile a, Tile b) {
         return p.cast(p.concatenate({bf16(p, p.slice(a, 0, kRows, 0, 64)), bf16(p, p.slice(b, 0, kRows, 0, 64))}, 1),
                       DType::f32);
       },
       [](B x, int64_t r, int64_t c) { return c < 64 ? x.A(r, c) : x.B(r, c - 64); }, 4e-3},
      {"slice", [](Program& p, Tile a, Tile) { return p.slice(a, 8, 8, 128, 128); },
       [](B x, int64_t r, int64_t c) { return x.A(r + 8, c + 128); }},
      {"transpose", [](Program& p, Tile a, Tile) { return p.transpose(a); },
       [](B x, int64_t r, int64_t c) { return x.A(c, r); }},
      matmul("matmul_of_f32", 1, 1, DType::f32),
      matmul("matmul_of_bf16", 1, 1, DType::bf16),
      matmul("matmul_over_rows", 0, 0, DType::f32),
      {"matmul_of_rows_by_columns",
       [](Program& p, Tile a, Tile b) { return p.matmul(bf16(p, a), bf16(p, p.transpose(b)), 1, 0); },
       [](B x, int64_t r, int64_t c) { return product(x, 1, 1, r, c); }, 0.1},
      {"matmul_of_columns_by_rows",
       [](Program& p, Tile a, Tile b) {
         a = p.slice(a, 0, kRows, 0, kFewColumns);
         return p.matmul(bf16(p, a), bf16(p, p.transpose(b)), 0, 1);
       },
       [](B x, int64_t r, int64_t c) { return product(x, 0, 0, r, c); }, 0.1},
  };
}

/// The case's program: inputs [2, 16, 256], one step per [16, 256].
Program program(const Case& of) {
  Program p(of.name, {kSteps}, 0);
  const Shape array{DType::f32, {kSteps, kRows, kColumns}};
  const Dims block = {1, kRows, kColumns};
  const Ref a = p.input("a", array, block, {{0}, {}, {}}), b = p.input("b", array, block, {{0}, {}, {}});
  // The result's shape must be known before its memory is declared.
  Program trial = p;
  const Shape result = of.build(trial, trial.load(a), trial.load(b)).shape;
  const Ref y = p.output("y", {result.dtype, {kSteps, result.dims[0], result.dims[1]}},
                         {1, result.dims[0], result.dims[1]}, {{0}, {}, {}});
  p.store(y, of.build(p, p.load(a), p.load(b)));
  return p;
}

HostArray numbers(const Shape& shape, double phase) {
  HostArray x(Shape{DType::f64, shape.dims});
  auto v = x.mutable_view<double>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(1.7 * static_cast<double>(i) + phase);
  return x.cast(shape.dtype);
}

TEST(TileOperations, HaveTheirValues) {
  for (const Case& of : cases()) {
    const Program p = program(of);
    const Shape array = p.memories()[0].array, result = p.memories()[2].array;
    const std::vector<HostArray> in = {numbers(array, 0.3), numbers(array, 1.1)};
    const auto out = evaluate(in, [&](Graph&, const std::vector<Tensor>& x) { return tiles::call(p, x); });
    Blocks x{in[0].to_doubles(), in[1].to_doubles(), 0};
    const auto y = out[0].to_doubles();
    for (size_t i = 0; i < y.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const int64_t rows = result.dims[1], columns = result.dims[2];
      x.step = at / (rows * columns);
      const double expected = of.expected(x, at / columns % rows, at % columns);
      ASSERT_NEAR(y[i], expected, of.tolerance * std::max(1.0, std::abs(expected))) << of.name << " at " << i;
    }
  }
}

/// Running sums of blocks of rows: scalars, scratch memory that persists between steps, conditions and a loop that
/// carries a tile; `by_rows`: rows of scratch memory at computed positions.
Program memory_program(bool by_rows) {
  Program p("memory", {2, 3}, 1);
  const Ref limits = p.scalars("limits", 2);
  const Ref x = p.input("x", {DType::bf16, {4, 48, 128}}, {1, 16, 128}, {{0, 1}, {1}, {}});
  const Ref y = p.output("y", {DType::f32, {2, 16, 128}}, {1, 16, 128}, {{0}, {}, {}});
  const Ref scratch = p.scratch("kept", {DType::f32, {16, 128}});
  const Tile step = p.coordinate(1), limit = p.read(limits, p.coordinate(0));
  p.when(p.equal(step, p.scalar(0)), [&] { p.store(scratch, p.constant(0, scratch.shape)); });
  p.when(p.less(step, limit), [&] {
    const auto out =
        p.loop(p.scalar(2), {p.constant(0, {DType::f32, {8, 128}})}, [&](Tile i, const std::vector<Tile>& c) {
          const Tile row = p.multiply(i, p.scalar(8)), part = p.cast(p.load(x), DType::f32),
                     top = p.slice(part, 0, 8, 0, 128);
          if (by_rows) p.store(scratch, p.add(p.load(scratch, row, 8, 8), top), row, 8);
          return std::vector<Tile>{p.add(c[0], top)};
        });
    if (by_rows) return p.store(scratch, p.add(p.load(scratch, 0, 8), out[0]), 0);
    p.store(scratch, p.add(p.load(scratch), p.concatenate({p.multiply(out[0], 1.5), p.multiply(out[0], 0.5)}, 0)));
  });
  p.when(p.equal(step, p.scalar(2)), [&] {  // the row of this step's number stays 0
    const Tile row = p.iota(16, 128, 0);
    p.store(y, p.select(p.equal(row, p.broadcast(step, 16, 128)), p.constant(0, scratch.shape), p.load(scratch)));
  });
  return p;
}

TEST(TileOperations, MemoryIsKeptBetweenStepsAndWrittenUnderConditions) {
  for (const bool by_rows : {true, false}) {
    if (by_rows && one_device().graph_options().platform == Platform::gpu) continue;  // refused, see below
    const Program p = memory_program(by_rows);
    const HostArray limits = HostArray::of<int32_t>({DType::s32, {2}}, std::vector<int32_t>{3, 2}),
                    x = numbers(p.memories()[1].array, 0.5);
    const auto out = evaluate({limits, x}, [&](Graph&, const std::vector<Tensor>& in) { return tiles::call(p, in); });
    const auto X = x.to_doubles(), y = out[0].to_doubles();
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t r = 0; r < 16; ++r)
        for (int64_t c = 0; c < 128; ++c) {
          double sum = 0;  // of row r mod 8 of each block below the limit; tripled for r < 8; row 2 is 0
          for (int64_t s = 0; s < (b ? 2 : 3); ++s) sum += X[static_cast<size_t>((b * 48 + s * 16 + r % 8) * 128 + c)];
          ASSERT_NEAR(y[static_cast<size_t>((b * 16 + r) * 128 + c)], r == 2 ? 0 : sum * (r < 8 ? 3 : 1), 1e-4)
              << b << " " << r << " " << c;
        }
  }
}

/// The example of docs/kernels.md: x f32 [1024, 256] → [1, 256], in eight steps, one after the other.
Program sum_of_rows() {
  Program p("sum_of_rows", {8}, /*sequential=*/1);
  // A step has the block of its coordinate on axis 0 of the grid; the output is one block of all steps.
  const Ref in = p.input("x", {DType::f32, {1024, 256}}, {128, 256}, {{0}, {}}),
            out = p.output("y", {DType::f32, {1, 256}}, {1, 256}, {{}, {}}),
            sum = p.scratch("sum", {DType::f32, {1, 256}});
  const Tile step = p.coordinate(0);
  p.when(p.equal(step, p.scalar(0)), [&] { p.store(sum, p.constant(0, sum.shape)); });
  p.store(sum, p.add(p.load(sum), p.sum_of(p.load(in), /*axis=*/0)));
  p.when(p.equal(step, p.scalar(7)), [&] { p.store(out, p.load(sum)); });
  return p;
}

TEST(TileOperations, OfTheDocumentAddUpRows) {
  const HostArray x = numbers({DType::f32, {1024, 256}}, 0.2);
  const auto out = evaluate({x}, [](Graph&, const std::vector<Tensor>& in) { return tiles::call(sum_of_rows(), in); });
  const auto X = x.to_doubles(), y = out[0].to_doubles();
  for (size_t c = 0; c < 256; ++c) {
    double sum = 0;
    for (size_t r = 0; r < 1024; ++r) sum += X[r * 256 + c];
    ASSERT_NEAR(y[c], sum, 1e-3) << c;
  }
}

TEST(TileOperations, CompileForEveryTpu) {
  if (const std::string missing = no_compiler("tpu"); !missing.empty()) GTEST_SKIP() << missing;
  expect_compiled(kTpus, [](const std::string&) {
    std::vector<Program> all = {memory_program(true), memory_program(false), sum_of_rows()};
    for (const Case& of : cases()) all.push_back(program(of));
    return all;
  });
}

TEST(TileOperations, CompileForGpus) {
  if (const std::string missing = no_compiler("gpu"); !missing.empty()) GTEST_SKIP() << missing;
  expect_compiled(kGpus, [](const std::string&) {
    std::vector<Program> all = {memory_program(false), sum_of_rows()};
    for (const Case& of : cases()) all.push_back(program(of));
    return all;
  });
}

TEST(TileOperations, WhatTritonHasNoFormOfIsRefusedByTheKernelsName) {
  const auto message = [](const Program& p) -> std::string {
    try {
      tiles::triton_text(p);
    } catch (const Error& e) {
      return e.message();
    }
    return "";
  };
  EXPECT_EQ(message(memory_program(true)),
            "kernel 'memory': some rows of the scratch memory 'kept', which Triton has no form of");
  Program odd("odd", {2}, 0);
  odd.load(odd.input("x", {DType::f32, {2, 24, 128}}, {1, 24, 128}, {{0}, {}, {}}));
  EXPECT_EQ(message(odd), "kernel 'odd': a tile f32[24,128], which Triton has no form of");
  Program small("small", {2}, 0);
  const Tile x = small.load(small.input("x", {DType::f32, {2, 8, 128}}, {1, 8, 128}, {{0}, {}, {}}));
  small.matmul(x, x, 1, 1);
  EXPECT_EQ(message(small), "kernel 'small': a matmul of f32[8,128] by f32[128,8], which Triton has no form of");
}

TEST(TileOperations, OfTritonHaveTheValuesOfStableHlo) {
  std::vector<Program> all = {memory_program(false), sum_of_rows()};
  for (const Case& of : cases()) all.push_back(program(of));
  for (const Program& p : all) {
    std::vector<HostArray> in;
    for (const tiles::Memory& m : p.memories())
      if (m.space == tiles::Space::scalars)
        in.push_back(HostArray::of<int32_t>({DType::s32, {2}}, std::vector<int32_t>{3, 2}));
      else if (m.space == tiles::Space::input)
        in.push_back(numbers(m.array, 0.3 + static_cast<double>(in.size())));
    expect_same_from_triton(p, in, 1e-5);
  }
}

/// What only the first and only the last step do stands outside of the loop; the loop carries the scratch memory.
TEST(TileOperations, OfTritonAreALoopBetweenTheFirstAndTheLastStep) {
  const std::string text = tiles::triton_text(sum_of_rows());
  const size_t loop = text.find("scf.for"), end = text.find("scf.yield"), store = text.find("tt.store");
  ASSERT_NE(loop, std::string::npos);
  EXPECT_EQ(text.find("scf.if"), std::string::npos) << text;
  EXPECT_LT(loop, end);
  EXPECT_LT(end, store);
  EXPECT_NE(text.find("-> (tensor<1x256xf32>)"), std::string::npos) << text;
}

TEST(TileOperations, WrongShapesAreRefusedByTheKernelsName) {
  Program p("odd", {2}, 0);
  const Ref x = p.input("x", {DType::f32, {2, 16, 128}}, {1, 16, 128}, {{0}, {}, {}});
  const auto message = [](const std::function<void()>& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      return e.message();
    }
    return "";
  };
  const Tile a = p.load(x), half = p.load(x, 0, 8);
  EXPECT_EQ(message([&] { p.add(a, half); }), "kernel 'odd': two operands of f32[16,128], f32[8,128]");
  EXPECT_EQ(message([&] { p.matmul(a, half, 1, 0); }), "kernel 'odd': matmul of f32[16,128], f32[8,128]");
  EXPECT_EQ(message([&] { p.store(x, a); }), "kernel 'odd': a store to the input 'x'");
  EXPECT_NE(message([&] {
              p.output("y", {DType::f32, {2, 16, 130}}, {1, 16, 128}, {{0}, {}, {}});
            }).find("which blocks of [1,16,128] do not divide"),
            std::string::npos);
}

}  // namespace
}  // namespace md
