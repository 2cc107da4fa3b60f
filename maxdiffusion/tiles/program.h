// A kernel as data: what one step of a grid does with blocks of arrays. It is printed as StableHLO, which runs on every
// device (stablehlo.h), and as a kernel for TPUs (mosaic.h) and NVIDIA GPUs (triton.h). docs/kernels.md explains it
// with an example.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/shape.h"

namespace md::tiles {

/// A value of a program: a scalar (s32, pred), or a tile [rows, columns] (f32, bf16, s32, pred).
struct Tile {
  int id = -1;
  Shape shape;
  bool is_scalar() const { return shape.dims.empty(); }
  int64_t rows() const { return shape.dims[0]; }
  int64_t columns() const { return shape.dims[1]; }
};

/// Memory that a program loads tiles from and stores tiles to.
struct Ref {
  int id = -1;
  Shape shape;  // [rows, columns]; scalars: [n]
};

/// Block index along an axis in a step: its coordinate on axis `grid` of the grid, divided and rounded down; −1: block
/// 0.
struct Place {
  int grid = -1;
  int64_t divide = 1;
};

enum class Space {
  scalars,  // s32 [n], a whole array
  input,    // a block of an array
  output,   // a block of an array; steps with the same block must be consecutive
  scratch,  // keeps stored values until the end of the kernel; undefined initially
};

struct Memory {
  Space space;
  std::string name;
  Shape array;               // scratch: [rows, columns]
  Dims block;                // the rank of the array; all but the last two are 1
  std::vector<Place> place;  // one per axis of the array
};

enum class Op {
  constant,
  coordinate,  // of the step, on axis `axis` of the grid
  read,        // a scalar of `ref`
  load,
  store,
  matmul,
  add,
  subtract,
  multiply,
  divide,
  maximum,
  minimum,
  both,  // of preds
  exp2,
  log2,
  cast,
  max_of,  // along `axis`, which stays with size 1
  sum_of,
  broadcast,
  select,
  iota,
  less,
  equal,
  concatenate,
  slice,
  transpose,
  when,
  loop,
};

struct Body;
struct Statement {
  Op op;
  std::vector<Tile> in, out;
  int ref = -1;
  double value = 0;
  int64_t axis = 0;
  int64_t contract[2] = {};  // axes of both operands that matmul sums over
  bool exact = false;        // matmul of f32 operands in f32
  int64_t start[2] = {};     // of a slice
  int64_t multiple = 1;      // known divisor of the row of a load or store
  std::vector<std::shared_ptr<Body>> bodies;
};
struct Body {
  std::vector<Tile> arguments;
  std::vector<Statement> statements;
  std::vector<Tile> results;
};

/// Built by calling its members in order. Each checks shapes and types, and throws invalid_graph with the program's
/// name and the operands.
class Program {
 public:
  /// `sequential`: number of last grid axes whose steps run in sequence, the last axis fastest; steps along the other
  /// axes run in any order.
  Program(std::string name, Dims grid, int sequential);

  // Memories, in the order of the printed program's operands and results: scalars, inputs, outputs, scratch.
  Ref scalars(std::string name, int64_t n);
  Ref input(std::string name, Shape array, Dims block, std::vector<Place> place);
  Ref output(std::string name, Shape array, Dims block, std::vector<Place> place);
  Ref scratch(std::string name, Shape shape);

  Tile constant(double value, Shape shape);
  Tile scalar(int64_t value) { return constant(static_cast<double>(value), {DType::s32, {}}); }
  Tile coordinate(int axis);
  Tile read(Ref scalars, Tile index);
  /// Rows [row, row + rows) of all columns; without arguments: all rows. `row` is a multiple of `multiple`.
  Tile load(Ref from);
  Tile load(Ref from, int64_t row, int64_t rows);
  Tile load(Ref from, Tile row, int64_t rows, int64_t multiple);
  void store(Ref to, Tile x, int64_t row = 0);
  void store(Ref to, Tile x, Tile row, int64_t multiple);
  /// f32. Both operands f32 or both bf16; `exact`: products of f32 are not rounded to bf16.
  Tile matmul(Tile a, Tile b, int64_t contract_a, int64_t contract_b, bool exact = false);
  Tile add(Tile a, Tile b) { return binary(Op::add, a, b); }
  Tile subtract(Tile a, Tile b) { return binary(Op::subtract, a, b); }
  Tile multiply(Tile a, Tile b) { return binary(Op::multiply, a, b); }
  Tile multiply(Tile a, double b) { return binary(Op::multiply, a, constant(b, a.shape)); }
  Tile divide(Tile a, Tile b) { return binary(Op::divide, a, b); }
  Tile maximum(Tile a, Tile b) { return binary(Op::maximum, a, b); }
  Tile minimum(Tile a, Tile b) { return binary(Op::minimum, a, b); }
  Tile both(Tile a, Tile b) { return binary(Op::both, a, b); }
  Tile exp2(Tile x) { return unary(Op::exp2, x); }
  Tile log2(Tile x) { return unary(Op::log2, x); }
  Tile cast(Tile x, DType type);
  Tile max_of(Tile x, int64_t axis) { return reduced(Op::max_of, x, axis); }
  Tile sum_of(Tile x, int64_t axis) { return reduced(Op::sum_of, x, axis); }
  /// Broadcasts a scalar, one row or one column.
  Tile broadcast(Tile x, int64_t rows, int64_t columns);
  Tile select(Tile pred, Tile yes, Tile no);
  /// s32: the row (axis 0) or the column (axis 1) of each element.
  Tile iota(int64_t rows, int64_t columns, int64_t axis);
  Tile less(Tile a, Tile b) { return compared(Op::less, a, b); }
  Tile equal(Tile a, Tile b) { return compared(Op::equal, a, b); }
  Tile concatenate(std::vector<Tile> parts, int64_t axis);
  Tile slice(Tile x, int64_t row, int64_t rows, int64_t column, int64_t columns);
  Tile transpose(Tile x);
  /// Runs the stores of `body` only if the scalar is true.
  void when(Tile condition, const std::function<void()>& body);
  /// `body(i, carried)` for i = 0 … count − 1 returns the next iteration's carried values; the result is those of the
  /// last iteration.
  std::vector<Tile> loop(Tile count, std::vector<Tile> carried,
                         const std::function<std::vector<Tile>(Tile i, const std::vector<Tile>&)>& body);

  const std::string& name() const { return name_; }
  const Dims& grid() const { return grid_; }
  int sequential() const { return sequential_; }
  const std::vector<Memory>& memories() const { return memories_; }
  const Body& body() const { return *bodies_.front(); }
  int values() const { return values_; }  // number of values; ids are below it
  /// Shapes of the results of a call.
  std::vector<Shape> results() const;
  /// Estimated bytes of a TPU's fast memory: two buffers for each block, scratch, and twice the largest tile, including
  /// padding to whole registers.
  int64_t fast_memory() const;
  /// Estimated work of a call, for the compiler's schedule. Of bodies of `when` the one with the most products counts,
  /// and always; a loop's body counts once unless the number of its iterations is a constant.
  struct Work {
    double flops = 0;            // of matrix products
    double transcendentals = 0;  // powers and logarithms
    double bytes = 0;            // blocks read and written, each time that their place changes
  };
  Work work() const;

 private:
  Ref add_memory(Memory m);
  Tile add_statement(Statement s, Shape out);
  Tile unary(Op op, Tile x);
  Tile binary(Op op, Tile a, Tile b);
  Tile compared(Op op, Tile a, Tile b);
  Tile reduced(Op op, Tile x, int64_t axis);
  std::shared_ptr<Body> traced(const std::function<void()>& body);
  void need(bool ok, const char* what, const std::vector<Tile>& operands) const;

  std::string name_;
  Dims grid_;
  int sequential_;
  std::vector<Memory> memories_;
  std::vector<std::shared_ptr<Body>> bodies_ = {std::make_shared<Body>()};  // the innermost one last
  int values_ = 0;
  int64_t largest_ = 0;
};

}  // namespace md::tiles
