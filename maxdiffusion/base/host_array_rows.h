// Rows of arrays: axis 0, usually the batch.
#pragma once

#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Rows [from, from + count); past the end the last row repeats.
HostArray rows(const HostArray& a, int64_t from, int64_t count);
/// Row `i` without axis 0; borrows the bytes.
HostArray row_of(const HostArray& a, int64_t i);
/// Writes the rows of `part` into `whole` from row `from`; rows past the end are dropped.
void set_rows(HostArray& whole, int64_t from, const HostArray& part);
/// Splits axis 0 into `parts` equal parts and concatenates those in `which`, in that order. Borrows the bytes if they
/// are adjacent.
HostArray select_parts(const HostArray& a, const std::vector<int64_t>& which, int64_t parts);
/// The inverse of select_parts: writes `some` into those parts of `whole`.
void set_parts(HostArray& whole, const std::vector<int64_t>& which, int64_t parts, const HostArray& some);
/// Elements [from, from + count) of axis 1 of the rows [row, row + rows); past the end the last one repeats.
HostArray block(const HostArray& a, int64_t row, int64_t rows, int64_t from, int64_t count);
/// Writes `part` into `whole` from row `row` and element `from` of axis 1; elements past the end are dropped.
void set_block(HostArray& whole, int64_t row, int64_t from, const HostArray& part);
/// Repeats every row `times` times, as numpy.repeat(a, times, axis=0).
HostArray repeat_rows(const HostArray& a, int64_t times);
/// The shape [n, …row].
Shape batched(int64_t n, Shape row);
/// Removes axis 0, which must have size 1.
HostArray without_batch(const HostArray& a);
/// Zeros with the shape and type of `a`.
HostArray zeros_like(const HostArray& a);
/// Allocates `whole` with `n` rows if it is empty; then as set_rows.
void add_rows(HostArray& whole, int64_t n, int64_t from, const HostArray& part);
/// f32 [N, C, …] → [N, …, C], and back.
HostArray channels_last(const HostArray& a);
HostArray channels_first(const HostArray& a);
/// Permutes the axes, outermost first (numpy.transpose).
HostArray with_axes(const HostArray& a, const Axes& order);
/// The transposed matrix.
HostArray transposed(const HostArray& matrix);

}  // namespace md
