// Rows of arrays: axis 0, usually the batch.
#pragma once

#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Rows [from, from + count); past the end the last row repeats.
HostArray rows(const HostArray& a, int64_t from, int64_t count);
/// Row `i` without its axis; it borrows the bytes.
HostArray row_of(const HostArray& a, int64_t i);
/// Writes the rows of `part` into `whole` from row `from`; rows past the end are dropped.
void set_rows(HostArray& whole, int64_t from, const HostArray& part);
/// Of `parts` equal parts of axis 0 those in `which`, in that order; where they follow one another it borrows the
/// bytes.
HostArray select_parts(const HostArray& a, const std::vector<int64_t>& which, int64_t parts);
/// Writes `some` to where select_parts takes it from.
void set_parts(HostArray& whole, const std::vector<int64_t>& which, int64_t parts, const HostArray& some);
/// Elements [from, from + count) of axis 1 of the rows [row, row + rows); past the ends the last repeat.
HostArray block(const HostArray& a, int64_t row, int64_t rows, int64_t from, int64_t count);
/// Writes `part` into `whole` from row `row` and element `from` of axis 1; what is past the ends is dropped.
void set_block(HostArray& whole, int64_t row, int64_t from, const HostArray& part);
/// Every row `times` times in succession.
HostArray repeat_rows(const HostArray& a, int64_t times);
/// The shape of `n` such rows in one array.
Shape batched(int64_t n, Shape row);
/// Without axis 0, which must be 1.
HostArray without_batch(const HostArray& a);
/// Zeros of the shape of `a`.
HostArray zeros_like(const HostArray& a);
/// Makes `whole`, where it is absent, of `n` rows like those of `part`; then as set_rows.
void add_rows(HostArray& whole, int64_t n, int64_t from, const HostArray& part);
/// f32 [N, C, …] → [N, …, C], and back.
HostArray channels_last(const HostArray& a);
HostArray channels_first(const HostArray& a);
/// The axes in another order, outermost first.
HostArray with_axes(const HostArray& a, const Axes& order);
/// A matrix with its axes exchanged.
HostArray transposed(const HostArray& matrix);

}  // namespace md
