// Pieces: parts of arrays in host memory, as the processes of a run hold, save and read them. Nobody need have an array
// whole. Pure data.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/mesh/sharding.h"

namespace md {

/// A part of an array; its values have the sizes of `slice`. With `make` they are made each time that they are read,
/// and `values` is empty.
struct Piece {
  Slice slice;
  HostArray values;
  std::function<HostArray()> make = {};

  HostArray get() const { return make ? make() : values; }
};

/// An array, and those pieces of it that are here; they do not overlap. Copies share the bytes.
struct ArrayPieces {
  Shape shape;  // of the array
  std::vector<Piece> pieces;

  ArrayPieces() = default;
  ArrayPieces(Shape shape, std::vector<Piece> pieces) : shape(std::move(shape)), pieces(std::move(pieces)) {}
  /// One piece that is all of the array.
  ArrayPieces(HostArray whole);  // NOLINT: an array is the simple case of its pieces

  /// Whether all of the array is here.
  bool complete() const;
  /// Any part of what is here, across pieces: borrowed where it lies in one piece without gaps, else copied. Throws
  /// internal where an element is not here.
  HostArray read(const Slice& slice) const;
  HostArray whole() const { return read(Slice::all(shape.dims)); }
  /// As read(); a piece that is just this slice is no longer here then.
  HostArray take(const Slice& slice);
  /// The same pieces in another type; those of this type share their bytes, those that are made are cast when they are.
  ArrayPieces cast(DType to) const;
  /// The same pieces, of zeros that are made when they are read.
  ArrayPieces zeros() const;
};

using NamedPieces = std::map<std::string, ArrayPieces>;
/// Between arrays that are whole and their pieces.
NamedPieces as_pieces(HostArrays arrays);
HostArrays as_arrays(const NamedPieces& pieces);

/// What two slices have in common; nothing where they do not meet.
std::optional<Slice> overlap(const Slice& a, const Slice& b);
/// The elements of `part` as they lie in the memory of `holder`, a slice that it is within: calls run(first, elements),
/// numbers among the holder's elements, for each stretch of neighbours, in order.
void each_run(const Slice& part, const Slice& holder, const std::function<void(int64_t first, int64_t count)>& run);

/// Empty where the slices make up an array of these sizes without hole or overlap; else what is wrong.
std::string tiling_fault(const Dims& dims, const std::vector<Slice>& slices);

}  // namespace md
