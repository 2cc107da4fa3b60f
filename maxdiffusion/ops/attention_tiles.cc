#include "maxdiffusion/ops/attention_tiles.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/round_up.h"
#include "maxdiffusion/ops/attention_search.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/tiles/call.h"

namespace md {
namespace {

using tiles::Place;
using tiles::Program;
using tiles::Ref;
using tiles::Tile;

constexpr double kLog2e = std::numbers::log2e, kLn2 = std::numbers::ln2;
constexpr double kMasked = -1e30;
constexpr int64_t kLanes = 128;  // of TPUs
constexpr TileChip kGpu{0, std::numeric_limits<int64_t>::max(), 1, true};

// ---- block sizes

constexpr int64_t kDefaultBlock = 1024, kDefaultCompute = 512;

struct SizeRule {
  const char* key;
  int64_t value, multiple;
  const char* of;  // the size must divide this one; null: no constraint
  int64_t whole;
};

void check_size(const SizeRule& rule) {
  const int64_t nearest = std::max(rule.multiple, (rule.value + rule.multiple / 2) / rule.multiple * rule.multiple);
  if (rule.value % rule.multiple != 0)
    throw Error(Code::invalid_config, fmt::format("flash_block_sizes: {} is {}; expected a multiple of {}", rule.key,
                                                  rule.value, rule.multiple))
        .note(fmt::format("try: {}: {}", rule.key, nearest));
  if (rule.of && rule.whole % rule.value != 0) {
    int64_t divisor = std::min(rule.value, rule.whole) / rule.multiple * rule.multiple;
    while (rule.whole % divisor != 0) divisor -= rule.multiple;
    throw Error(Code::invalid_config, fmt::format("flash_block_sizes: {} is {}, which does not divide {} of {}",
                                                  rule.key, rule.value, rule.of, rule.whole))
        .note(fmt::format("try: {}: {}", rule.key, divisor));
  }
}

/// The first size that is set; the last one is.
int64_t first_of(std::initializer_list<int64_t> sizes) {
  for (int64_t s : sizes)
    if (s > 0) return s;
  return 1;
}

// ---- arrays

/// If a head's features fill whole registers, arrays are read as [B, L, H·D], else as [B, H, L, D].
bool tokens_first(const TileAttention& a) { return a.head_dim % a.chip.lanes == 0; }

Shape array_of(const TileAttention& a, int64_t length, int64_t heads, DType type) {
  return tokens_first(a) ? Shape{type, {a.batch, length, heads * a.head_dim}}
                         : Shape{type, {a.batch, heads, length, a.head_dim}};
}
/// An array of heads in blocks of `rows` rows; axis `grid` of the grid (batch, head, …) selects the block.
Ref rows_of(Program& p, const TileAttention& a, const char* name, int64_t length, int64_t rows, int grid, bool keys,
            tiles::Space space, DType type) {
  const int64_t heads = keys ? a.kv_heads : a.heads;
  const Place sample{0}, head{1, keys ? a.heads / a.kv_heads : 1}, at{grid};
  const Shape array = array_of(a, length, heads, type);
  const Dims block = tokens_first(a) ? Dims{1, rows, a.head_dim} : Dims{1, 1, rows, a.head_dim};
  std::vector<Place> place =
      tokens_first(a) ? std::vector<Place>{sample, at, head} : std::vector<Place>{sample, head, at, {}};
  return space == tiles::Space::input ? p.input(name, array, block, std::move(place))
                                      : p.output(name, array, block, std::move(place));
}

// ---- one value per key or query of a sample

/// One value for each of `length` positions, as rows or columns; the block is selected by axis `grid` of the grid.
Ref line_of(Program& p, const TileAttention& a, const char* name, int64_t length, int64_t block, int grid, bool column,
            DType type) {
  const int64_t lanes = a.chip.lanes;
  return column ? p.input(name, {type, {a.batch, length, lanes}}, {1, block, lanes}, {{0}, {grid}, {}})
                : p.input(name, {type, {a.batch, length / block, 1, block}}, {1, 1, 1, block}, {{0}, {grid}, {}, {}});
}
/// A tile of one value per row, stored in all lanes, with `columns` columns.
Tile widened(Program& p, Tile x, int64_t columns) {
  const int64_t lanes = x.columns();
  if (lanes == 1 || columns % lanes != 0) return p.broadcast(p.slice(x, 0, x.rows(), 0, 1), x.rows(), columns);
  return p.concatenate(std::vector<Tile>(static_cast<size_t>(columns / lanes), x), 1);
}
/// Values of positions [from, from + n) of the block, broadcast over `others` positions of the other kind: [others, n],
/// or [n, others] for a column.
Tile line(Program& p, Ref from_ref, bool column, int64_t from, int64_t n, int64_t others) {
  if (!column) return p.broadcast(p.slice(p.load(from_ref), 0, 1, from, n), others, n);
  return widened(p, p.load(from_ref, from, n), others);
}

/// Whether bf16 queries times the scale are split into two exact bf16 parts, which is free if the matrix unit has
/// unused rows; else logits are scaled.
bool queries_in_parts(const TileAttention& a) {
  return a.type == DType::bf16 && a.head_dim % a.chip.lanes == 0 && 2 * a.head_dim <= a.chip.matrix;
}

// ---- masks

/// End of the needed part of a partially masked block, if that is always the last block.
int64_t end_of_part(const TileAttention& a, int64_t block_k) {
  return a.causal || a.limited || a.segments || a.keys % block_k == 0 ? block_k : a.keys % block_k;
}

/// Which keys a step's block of queries attends to in its block of keys, as scalars.
struct Seen {
  Tile keys;     // number of keys, minus the position of the block's first key
  Tile queries;  // causal: position of the first query + 1, minus the position of the block's first key
  Tile all, some;
};

struct Masks {
  Program& p;
  const TileAttention& a;
  bool any;  // whether some logits may be masked
  int64_t block_q, block_k;
  Ref limits, query_segments, key_segments;

  Seen visible(int axis_q, int axis_k) {
    Seen s;
    Tile first = p.multiply(p.coordinate(axis_k), p.scalar(block_k));
    Tile keys = a.limited ? p.read(limits, p.add(p.coordinate(0), p.scalar(1))) : p.scalar(a.keys);
    s.keys = p.subtract(keys, first);
    Tile least = s.keys, most = s.keys;
    if (a.causal) {
      Tile shift = a.limited ? p.read(limits, p.scalar(0)) : p.scalar(0);
      Tile query = p.add(p.multiply(p.coordinate(axis_q), p.scalar(block_q)), shift);
      s.queries = p.subtract(p.add(query, p.scalar(1)), first);
      least = p.minimum(least, s.queries);
      most = p.minimum(most, p.add(s.queries, p.scalar(block_q - 1)));
    }
    s.some = p.less(p.scalar(0), most);
    if (a.segments) return s;
    s.all = p.less(p.scalar(block_k - 1), least);
    s.some = p.both(s.some, p.less(least, p.scalar(block_k)));
    return s;
  }
  /// Masks logits of keys [from, from + keys) of the block. `transposed`: keys are rows.
  Tile apply(const Seen& s, Tile logits, int64_t from, bool transposed) {
    const int64_t r = logits.rows(), c = logits.columns();
    Tile key = p.iota(r, c, transposed ? 0 : 1);
    Tile keep = p.less(key, p.broadcast(p.subtract(s.keys, p.scalar(from)), r, c));
    if (a.causal) {
      Tile query = p.add(p.iota(r, c, transposed ? 1 : 0), p.broadcast(p.subtract(s.queries, p.scalar(from)), r, c));
      keep = p.both(keep, p.less(key, query));
    }
    if (a.segments) {
      const int64_t keys = transposed ? r : c;
      keep = p.both(keep, p.equal(line(p, key_segments, transposed, from, keys, block_q),
                                  line(p, query_segments, !transposed, 0, block_q, keys)));
    }
    return p.select(keep, logits, p.constant(kMasked, logits.shape));
  }
  /// Runs `step(masked)` for partially masked blocks and for unmasked blocks; skips blocks that are fully masked.
  void run(int axis_q, int axis_k, const std::function<void(const Seen*)>& step) {
    if (!any) return step(nullptr);
    const Seen s = visible(axis_q, axis_k);
    if (!a.segments) p.when(s.all, [&] { step(nullptr); });
    p.when(s.some, [&] { step(&s); });
  }
};

bool masks(const TileAttention& a, int64_t block_k) {
  return a.causal || a.limited || a.segments || a.keys % block_k != 0;
}

/// The least size of a GPU's tile that holds `n` rows or columns.
int64_t gpu_size(int64_t n) {
  return std::max<int64_t>(16, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))));
}

/// Block sizes for GPUs, by what the registers and the shared memory of a multiprocessor hold.
AttentionBlocks gpu_blocks(const TileAttention& a) {
  const bool wide = a.type == DType::f32;
  const int64_t rows = a.head_dim > 128 ? 64 : 128;  // of queries of one program
  const auto at_most = [](int64_t size, int64_t length) { return std::min(size, gpu_size(length)); };
  AttentionBlocks b;
  b.queries = at_most(wide ? rows / 2 : rows, a.queries);
  b.keys = b.keys_compute = at_most((a.head_dim > 128 ? 32 : 64) / (wide ? 2 : 1), a.keys);
  b.gradient_queries = at_most(wide || a.head_dim > 128 ? 32 : 64, a.queries);
  b.gradient_keys = b.gradient_keys_compute = at_most(wide || a.head_dim > 128 ? 32 : 64, a.keys);
  b.dq_queries = b.gradient_queries;
  b.dq_keys = b.gradient_keys;
  b.fused_gradient = AttentionBlocks::Fused::no;  // it would keep a head's queries in registers
  return b;
}

}  // namespace

TileChip tile_chip(const std::string& kind) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  if (kind.starts_with("NVIDIA")) return kGpu;
  if (kind == "TPU v6 lite" || kind == "TPU v6e") return {256, 96 * kMiB};
  if (kind == "TPU7x" || kind == "TPU v7x" || kind == "TPU7") return {256, 48 * kMiB};
  if (kind == "TPU v5 lite" || kind == "TPU v5e") return {128, 96 * kMiB};
  if (kind == "TPU v5" || kind == "TPU v5p") return {128, 48 * kMiB};
  return {};
}

int64_t tile_head_dim(int64_t head_dim, const TileChip& chip) { return chip.is_gpu ? gpu_size(head_dim) : head_dim; }

AttentionBlocks tile_blocks(const TileAttention& a) {
  if (a.chip.is_gpu) return gpu_blocks(a);
  AttentionBlocks b = a.blocks;
  const int64_t rows = a.type == DType::bf16 ? 16 : 8;
  b.queries = first_of({b.queries, kDefaultBlock});
  b.keys = first_of({b.keys, kDefaultBlock});
  b.keys_compute = first_of({b.keys_compute, b.keys % kDefaultCompute == 0 ? kDefaultCompute : b.keys});
  check_size({"block_q", b.queries, rows, nullptr, 0});
  check_size({"block_kv", b.keys, kLanes, nullptr, 0});
  check_size({"block_kv_compute", b.keys_compute, kLanes, "block_kv", b.keys});
  // The smallest possible number of blocks of queries, all of one size.
  const auto even = [&](int64_t most) {
    const int64_t count = (a.queries + most - 1) / most;
    return round_up((a.queries + count - 1) / count, rows);
  };
  b.queries = even(b.queries);
  if (const int64_t whole = round_up(a.keys, kLanes); b.keys > whole) {
    b.keys = whole;
    if (b.keys % b.keys_compute != 0) b.keys_compute = whole;
  }
  b.gradient_queries = first_of({b.gradient_queries, b.queries});
  b.gradient_keys = first_of({b.gradient_keys, b.keys});
  b.gradient_keys_compute =
      first_of({b.gradient_keys_compute, b.gradient_keys % kDefaultCompute == 0 ? kDefaultCompute : b.gradient_keys});
  b.dq_queries = first_of({b.dq_queries, b.gradient_queries});
  b.dq_keys = first_of({b.dq_keys, b.gradient_keys});
  check_size({"block_q_dkv", b.gradient_queries, rows, nullptr, 0});
  check_size({"block_kv_dkv", b.gradient_keys, kLanes, nullptr, 0});
  check_size({"block_kv_dkv_compute", b.gradient_keys_compute, kLanes, "block_kv_dkv", b.gradient_keys});
  check_size({"block_q_dq", b.dq_queries, rows, nullptr, 0});
  check_size({"block_kv_dq", b.dq_keys, kLanes, nullptr, 0});
  const int64_t whole = round_up(a.keys, kLanes);
  for (int64_t* size : {&b.gradient_queries, &b.dq_queries}) *size = even(*size);
  for (int64_t* size : {&b.gradient_keys, &b.dq_keys}) *size = std::min(*size, whole);
  if (b.gradient_keys % b.gradient_keys_compute != 0) b.gradient_keys_compute = b.gradient_keys;
  return b;
}

tiles::Program tile_attention_program(const TileAttention& a) {
  const AttentionBlocks b = tile_blocks(a);
  const int64_t bq = b.queries, bk = b.keys, sub = b.keys_compute, d = a.head_dim;
  const int64_t lq = round_up(a.queries, bq), lk = round_up(a.keys, bk), nq = lq / bq, nk = lk / bk;
  const int64_t lanes = a.chip.lanes;
  // Columns of ones appended to v make the matrix unit compute row sums, if it has unused columns.
  const bool ones = round_up(d, lanes) < a.chip.matrix || d % lanes != 0;
  const int64_t width = ones ? round_up(d + 1, lanes) : d;
  const bool parts = queries_in_parts(a);
  const double scale = a.scale * kLog2e, of_logits = parts ? 1 : scale;

  Program p("attention", {a.batch, a.heads, nq, nk}, 1);
  Masks mask{p, a, masks(a, bk), bq, bk, {}, {}, {}};
  if (a.limited) mask.limits = p.scalars("limits", 1 + a.batch);
  const Ref q = rows_of(p, a, "q", lq, bq, 2, false, tiles::Space::input, a.type),
            k = rows_of(p, a, "k", lk, bk, 3, true, tiles::Space::input, a.type),
            v = rows_of(p, a, "v", lk, bk, 3, true, tiles::Space::input, a.type);
  const Ref bias = a.key_bias ? line_of(p, a, "key_bias", lk, bk, 3, false, DType::f32) : Ref{};
  if (a.segments) {
    mask.query_segments = line_of(p, a, "query_segments", lq, bq, 2, true, DType::s32);
    mask.key_segments = line_of(p, a, "key_segments", lk, bk, 3, false, DType::s32);
  }
  const Ref y = rows_of(p, a, "y", lq, bq, 2, false, tiles::Space::output, a.type),
            lse =
                p.output("lse", {DType::f32, {a.batch, a.heads, nq, 1, bq}}, {1, 1, 1, 1, bq}, {{0}, {1}, {2}, {}, {}});
  const Ref most = p.scratch("most", {DType::f32, {bq, lanes}}), sum = p.scratch("sum", {DType::f32, {bq, width}});
  Ref total = ones ? Ref{} : p.scratch("total", {DType::f32, {bq, lanes}});
  Ref scaled = parts ? p.scratch("scaled", {DType::bf16, {bq, 2 * d}}) : Ref{};
  // Logits are scaled after subtracting their maximum: scaling before would be another pass over them.
  const auto power = [&](Tile x) { return p.exp2(of_logits == 1 ? x : p.multiply(x, of_logits)); };

  const Tile j = p.coordinate(3);
  p.when(p.equal(j, p.scalar(0)), [&] {
    p.store(most, p.constant(kMasked, most.shape));
    p.store(sum, p.constant(0, sum.shape));
    if (!ones) p.store(total, p.constant(0, total.shape));
    if (!parts) return;
    const Tile x = p.multiply(p.cast(p.load(q), DType::f32), scale), high = p.cast(x, DType::bf16),
               low = p.cast(p.subtract(x, p.cast(high, DType::f32)), DType::bf16);
    p.store(scaled, p.concatenate({high, low}, 1));
  });
  mask.run(2, 3, [&](const Seen* visible) {
    const Tile queries = p.load(parts ? scaled : q);
    for (int64_t from = 0; from < (visible ? end_of_part(a, bk) : bk); from += sub) {
      Tile keys = p.load(k, from, sub), values = p.load(v, from, sub);
      if (parts) keys = p.concatenate({keys, keys}, 1);
      if (ones) values = p.concatenate({values, p.constant(1, {a.type, {sub, width - d}})}, 1);
      Tile s = p.matmul(queries, keys, 1, 1, a.exact);
      if (a.key_bias) s = p.add(s, line(p, bias, false, from, sub, bq));
      if (visible) s = mask.apply(*visible, s, from, false);
      const Tile before = p.load(most), now = p.maximum(before, p.broadcast(p.max_of(s, 1), bq, lanes)),
                 e = power(p.subtract(s, widened(p, now, sub))), shrunk = power(p.subtract(before, now));
      p.store(most, now);
      if (!ones) p.store(total, p.add(p.multiply(p.load(total), shrunk), p.broadcast(p.sum_of(e, 1), bq, lanes)));
      p.store(sum, p.add(p.multiply(p.load(sum), widened(p, shrunk, width)),
                         p.matmul(p.cast(e, a.type), values, 1, 0, a.exact)));
    }
  });
  p.when(p.equal(j, p.scalar(nk - 1)), [&] {
    const Tile all = p.load(sum);
    Tile of_row = ones ? p.broadcast(p.slice(all, 0, bq, d, 1), bq, lanes) : p.load(total);
    of_row = p.maximum(of_row, p.constant(1e-30, of_row.shape));  // for samples without keys
    p.store(y, p.cast(p.divide(p.slice(all, 0, bq, 0, d), widened(p, of_row, d)), a.type));
    const Tile logs = p.add(p.multiply(p.load(most), of_logits * kLn2), p.multiply(p.log2(of_row), kLn2));
    p.store(lse, p.slice(p.transpose(logs), 0, 1, 0, bq));
  });
  return p;
}

double tile_bias_factor(const TileAttention& a) { return queries_in_parts(a) ? kLog2e : 1 / a.scale; }

// Logits are computed transposed, [keys, queries]: a value per query is then one row, as in memory, and dk and dv are
// products of rows by columns.
tiles::Program tile_gradient_program(const TileAttention& a, TileGradient kind) {
  const AttentionBlocks b = tile_blocks(a);
  const bool of_q = kind != TileGradient::dkv, of_keys = kind != TileGradient::dq, fused = of_q && of_keys;
  const int64_t bq = of_keys ? b.gradient_queries : b.dq_queries, bk = of_keys ? b.gradient_keys : b.dq_keys,
                sub = bk % b.gradient_keys_compute == 0 ? b.gradient_keys_compute : bk, d = a.head_dim;
  const int64_t lq = round_up(a.queries, bq), lk = round_up(a.keys, bk), nq = lq / bq, nk = lk / bk;
  const double scale = a.scale * kLog2e;
  // For the gradient of keys, a block of keys is combined with all queries in sequence.
  const int axis_q = of_keys ? 3 : 2, axis_k = of_keys ? 2 : 3;
  Program p(fused  ? "attention_gradient"
            : of_q ? "attention_dq"
                   : "attention_dkv",
            {a.batch, a.heads, of_keys ? nk : nq, of_keys ? nq : nk}, fused ? 2 : 1);
  Masks mask{p, a, masks(a, bk), bq, bk, {}, {}, {}};
  if (a.limited) mask.limits = p.scalars("limits", 1 + a.batch);
  const auto in = tiles::Space::input, out = tiles::Space::output;
  const Ref q = rows_of(p, a, "q", lq, bq, axis_q, false, in, a.type),
            k = rows_of(p, a, "k", lk, bk, axis_k, true, in, a.type),
            v = rows_of(p, a, "v", lk, bk, axis_k, true, in, a.type),
            dy = rows_of(p, a, "dy", lq, bq, axis_q, false, in, a.type);
  const auto statistic = [&](const char* name) {
    return p.input(name, {DType::f32, {a.batch, a.heads, nq, 1, bq}}, {1, 1, 1, 1, bq}, {{0}, {1}, {axis_q}, {}, {}});
  };
  const Ref lse = statistic("lse"), slope = statistic("slope");
  const Ref bias = a.key_bias ? line_of(p, a, "key_bias", lk, bk, axis_k, true, DType::f32) : Ref{};
  if (a.segments) {
    mask.query_segments = line_of(p, a, "query_segments", lq, bq, axis_q, false, DType::s32);
    mask.key_segments = line_of(p, a, "key_segments", lk, bk, axis_k, true, DType::s32);
  }
  const bool of_bias = a.key_bias && of_keys;
  TileAttention each = a;  // dk and dv of each head of q; they are summed for heads that share keys
  each.kv_heads = a.heads;
  const DType of_sums = a.part_of_queries ? DType::f32 : a.type;
  Ref before_k, before_v;
  if (a.adds_to_keys) {
    before_k = rows_of(p, each, "dk_before", lk, bk, axis_k, true, in, of_sums);
    before_v = rows_of(p, each, "dv_before", lk, bk, axis_k, true, in, of_sums);
  }
  // With the fused kernel, all queries of a head stay in fast memory.
  Ref dq, dk, dv, db, sum_q, sum_k, sum_v, sum_b;
  const int64_t rows = fused ? lq : bq;
  if (of_q) dq = rows_of(p, a, "dq", lq, rows, fused ? -1 : axis_q, false, out, a.type);
  if (of_keys) dk = rows_of(p, each, "dk", lk, bk, axis_k, true, out, of_sums);
  if (of_keys) dv = rows_of(p, each, "dv", lk, bk, axis_k, true, out, of_sums);
  if (of_bias)
    db = p.output("dbias", {DType::f32, {a.batch, a.heads, nk, 1, bk}}, {1, 1, 1, 1, bk}, {{0}, {1}, {axis_k}, {}, {}});
  if (of_q) sum_q = p.scratch("sum_q", {DType::f32, {rows, d}});
  if (of_keys) {
    sum_k = p.scratch("sum_k", {DType::f32, {bk, d}});
    sum_v = p.scratch("sum_v", {DType::f32, {bk, d}});
  }
  if (of_bias) sum_b = p.scratch("sum_b", {DType::f32, {bk, a.chip.lanes}});

  const Tile i = p.coordinate(axis_q), j = p.coordinate(axis_k),
             row = fused ? p.multiply(i, p.scalar(bq)) : p.scalar(0);
  const int64_t multiple = fused ? bq : 1;
  const auto zero = [&](Ref r) { p.store(r, p.constant(0, r.shape)); };
  if (of_keys)
    p.when(p.equal(i, p.scalar(0)), [&] {
      zero(sum_k);
      zero(sum_v);
      if (of_bias) zero(sum_b);
    });
  if (of_q)
    p.when(p.equal(j, p.scalar(0)), [&] { p.store(sum_q, p.constant(0, {DType::f32, {bq, d}}), row, multiple); });
  mask.run(axis_q, axis_k, [&](const Seen* visible) {
    const Tile queries = p.load(q), slopes = p.load(dy), logs = p.load(lse), sums = p.load(slope);
    for (int64_t from = 0; from < (visible ? end_of_part(a, bk) : bk); from += sub) {
      const Tile keys = p.load(k, from, sub), values = p.load(v, from, sub);
      Tile s = p.matmul(keys, queries, 1, 1, a.exact);
      if (a.key_bias) s = p.add(p.multiply(s, scale), line(p, bias, true, from, sub, bq));
      if (visible) s = mask.apply(*visible, s, from, true);
      const Tile e = p.exp2(p.subtract(a.key_bias ? s : p.multiply(s, scale), p.broadcast(logs, sub, bq)));
      if (of_keys)
        p.store(sum_v, p.add(p.load(sum_v, from, sub), p.matmul(p.cast(e, a.type), slopes, 1, 0, a.exact)), from);
      const Tile de = p.matmul(values, slopes, 1, 1, a.exact),
                 exact = p.multiply(e, p.subtract(de, p.broadcast(sums, sub, bq))), ds = p.cast(exact, a.type);
      if (of_bias)
        p.store(sum_b, p.add(p.load(sum_b, from, sub), p.broadcast(p.sum_of(exact, 1), sub, a.chip.lanes)), from);
      if (of_keys) p.store(sum_k, p.add(p.load(sum_k, from, sub), p.matmul(ds, queries, 1, 0, a.exact)), from);
      if (of_q)
        p.store(sum_q, p.add(p.load(sum_q, row, bq, multiple), p.matmul(ds, keys, 0, 0, a.exact)), row, multiple);
    }
  });
  const auto scaled = [&](Tile x, DType type) { return p.cast(p.multiply(x, a.scale), type); };
  if (of_keys)
    p.when(p.equal(i, p.scalar(nq - 1)), [&] {
      const auto with = [&](Ref before, Tile x) { return a.adds_to_keys ? p.add(p.load(before), x) : x; };
      p.store(dk, with(before_k, scaled(p.load(sum_k), of_sums)));
      p.store(dv, with(before_v, p.cast(p.load(sum_v), of_sums)));
      if (of_bias) p.store(db, p.slice(p.transpose(p.load(sum_b)), 0, 1, 0, bk));
    });
  if (of_q)
    p.when(p.equal(j, p.scalar(nk - 1)),
           [&] { p.store(dq, scaled(p.load(sum_q, row, bq, multiple), a.type), row, multiple); });
  return p;
}

namespace {

/// An array of the model, [B, L, H, D], in the kernels' layout, zero-padded.
Tensor to_kernel(const TileAttention& a, Tensor x, int64_t length) {
  x = pad_end(pad_end(x, 1, length), 3, a.head_dim);
  return tokens_first(a) ? reshape(x, {x.dim(0), length, x.dim(2) * x.dim(3)}) : transpose(x, {0, 2, 1, 3});
}
/// `like`: [B, length, heads, D] of the model.
Tensor from_kernel(const TileAttention& a, Tensor x, const Dims& like) {
  x = tokens_first(a) ? reshape(x, {x.dim(0), x.dim(1), x.dim(2) / a.head_dim, a.head_dim})
                      : transpose(x, {0, 2, 1, 3});
  for (const int64_t axis : {1, 3})
    if (const int64_t n = like[static_cast<size_t>(axis)]; x.dim(axis) != n) x = slice_axis(x, axis, 0, n);
  return x;
}

TileAttention call_of(Tensor q, Tensor k, const LocalAttention& options) {
  const GraphOptions& device = q.graph().options();
  const TileChip chip = device.platform == Platform::gpu ? kGpu : tile_chip(device.device_kind);
  TileAttention a{.batch = q.dim(0),
                  .heads = q.dim(2),
                  .kv_heads = k.dim(2),
                  .queries = q.dim(1),
                  .keys = k.dim(1),
                  .head_dim = tile_head_dim(q.dim(3), chip),
                  .type = q.dtype(),
                  .scale = options.scale,
                  .causal = options.causal,
                  .exact = options.precision != Precision::default_,
                  .limited = options.lengths || options.first_query || options.first_key || options.keys >= 0,
                  .key_bias = static_cast<bool>(options.key_bias),
                  .segments = static_cast<bool>(options.key_segments),
                  .blocks = options.blocks,
                  .chip = chip};
  a.blocks = tile_blocks(a);
  return a;
}

/// The options with measured block sizes, if they ask for a search.
LocalAttention searched(Tensor q, Tensor k, LocalAttention options, bool gradient) {
  if (!options.blocks.search) return options;
  TileAttention a = call_of(q, k, options);
  a.blocks = options.blocks;
  options.blocks.search = nullptr;
  if (!a.chip.is_gpu) options.blocks = searched_blocks(q.graph().options(), a, gradient);
  return options;
}

/// x [B, L] as a kernel's rows or columns.
Tensor to_line(const TileAttention& a, Tensor x, int64_t length, int64_t block, bool column) {
  x = pad_end(x, 1, length);
  const int64_t batch = x.dim(0);
  return column ? broadcast_to(expand_dims(x, 2), {batch, length, a.chip.lanes})
                : reshape(x, {batch, length / block, 1, block});
}

/// The kernels' scalars.
Tensor limits_of(Graph& g, const TileAttention& a, const LocalAttention& options) {
  const Shape one{DType::s32, {1}}, each{DType::s32, {a.batch}};
  Tensor shift = full(g, 0, one), keys = full(g, static_cast<double>(a.keys), each);
  if (options.first_query) shift = shift + broadcast_to(options.first_query, {1});
  if (options.first_key) shift = shift - broadcast_to(options.first_key, {1});
  Tensor first = options.first_key ? broadcast_to(options.first_key, {a.batch}) : full(g, 0, each);
  if (options.keys >= 0) keys = minimum(keys, full(g, static_cast<double>(options.keys), each) - first);
  if (options.lengths) keys = minimum(keys, options.lengths - first);
  return concatenate({shift, keys}, 0);
}

}  // namespace

namespace {

/// Throws invalid_config, with a size that fits, unless a kernel's blocks fit the chip's fast memory. `make`: the
/// kernel for given sizes.
void check_fits(const TileAttention& a, const char* key, int64_t AttentionBlocks::*size,
                const std::function<Program(const TileAttention&)>& make) {
  const int64_t need = make(a).fast_memory(), have = a.chip.fast_memory;
  if (need <= have) return;
  TileAttention smaller = a;
  int64_t& rows = smaller.blocks.*size;
  while (rows >= 32 && make(smaller).fast_memory() > have) rows = rows / 32 * 16;
  const auto mebibytes = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  throw Error(
      Code::invalid_config,
      fmt::format("flash_block_sizes: {} is {}; the kernel's blocks take {:.1f} MiB of fast memory, expected at "
                  "most {:.1f} MiB",
                  key, a.blocks.*size, mebibytes(need), mebibytes(have)))
      .note(fmt::format("try: {}: {}", key, rows));
}

}  // namespace

bool has_tile_kernels(const GraphOptions& device) { return device.platform == Platform::tpu || device.nvidia_kernels; }

const char* tile_attention_refuses(Tensor q, Tensor k, Tensor v, const LocalAttention& options) {
  const GraphOptions& o = q.graph().options();
  if (!has_tile_kernels(o)) return "the device is no TPU and no NVIDIA GPU from Ampere on";
  if (!o.one_device()) return "the call is not inside a manual computation";
  if (!options.in_blocks) return "all logits are requested";
  if (options.bias) return "there is a bias";
  if (q.dtype() != DType::bf16 && q.dtype() != DType::f32) return "kernels are for bf16 and f32";
  if (k.dtype() != q.dtype() || v.dtype() != q.dtype()) return "kernels are for arrays of one type";
  if (q.dim(3) > 256 || q.dim(3) < 8) return "kernels are for heads of 8 to 256 values";
  return nullptr;
}

AttentionResult tile_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& requested) {
  const LocalAttention options = searched(q, k, requested, /*gradient=*/false);
  const TileAttention a = call_of(q, k, options);
  const int64_t lq = round_up(a.queries, a.blocks.queries), lk = round_up(a.keys, a.blocks.keys);
  std::vector<Tensor> in;
  if (a.limited) in.push_back(limits_of(q.graph(), a, options));
  for (const auto& [x, length] : {std::pair{q, lq}, {k, lk}, {v, lk}}) in.push_back(to_kernel(a, x, length));
  if (a.key_bias) in.push_back(to_line(a, options.key_bias * tile_bias_factor(a), lk, a.blocks.keys, false));
  if (a.segments) {
    in.push_back(to_line(a, options.query_segments, lq, a.blocks.queries, true));
    in.push_back(to_line(a, options.key_segments, lk, a.blocks.keys, false));
  }
  check_fits(a, "block_q", &AttentionBlocks::queries, tile_attention_program);
  const auto out = tiles::call(tile_attention_program(a), in,
                               4.0 * static_cast<double>(a.batch * a.heads * a.head_dim) *
                                   static_cast<double>(a.queries) * static_cast<double>(a.keys));
  Tensor lse = reshape(out[1], {a.batch, a.heads, lq});
  return {from_kernel(a, out[0], q.dims()), lq == a.queries ? lse : slice_axis(lse, 2, 0, a.queries)};
}

namespace {

/// The smallest number of equal parts of the queries for which the fused kernel fits; 0: none.
int64_t parts_of_queries(TileAttention a) {
  constexpr int64_t kMost = 8;  // each is one more kernel to compile
  a.part_of_queries = a.adds_to_keys = true;
  const int64_t queries = a.queries;
  for (int64_t n = 2; n <= kMost; ++n) {
    a.queries = (queries + n - 1) / n;
    if (a.queries < a.blocks.gradient_queries) break;
    if (tile_gradient_program(a, TileGradient::fused).fast_memory() <= a.chip.fast_memory) return n;
  }
  return 0;
}

/// dk and dv of parts of the queries so far, as the kernel stores them.
struct KeySums {
  Tensor k, v;
};

/// The gradient of keys in the model's layout, [B, Lk, heads of keys, D], from the kernel's, which has all heads of q.
Tensor key_gradient(const TileAttention& a, Tensor x, int64_t head_dim) {
  x = from_kernel(a, x, {a.batch, a.keys, a.heads, head_dim});
  const int64_t group = a.heads / a.kv_heads;
  return group == 1 ? x : sum(reshape(cast(x, DType::f32), {a.batch, a.keys, a.kv_heads, group, head_dim}), {3});
}

/// `sums`, if any, are added to and updated, and the result has no k and v.
AttentionGradient gradient_of(const TileAttention& a, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                              const LocalAttention& options, KeySums* sums = nullptr);

/// The sum over parts of the queries, each by the fused kernel: five products for each block of logits, not seven. Each
/// part adds to the dk and dv of those before it, so that two of each are in memory at most.
AttentionGradient gradient_in_parts(int64_t parts, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                    const LocalAttention& options) {
  AttentionGradient all;
  KeySums sums;
  std::vector<Tensor> dqs;
  const int64_t queries = q.dim(1), rows = (queries + parts - 1) / parts;
  for (int64_t from = 0; from < queries; from += rows) {
    const int64_t end = std::min(queries, from + rows);
    const auto part = [&](Tensor x, int64_t axis = 1) { return slice_axis(x, axis, from, end); };
    LocalAttention o = options;
    const Tensor first = full(q.graph(), static_cast<double>(from), {DType::s32, {}});
    if (o.causal) o.first_query = o.first_query ? o.first_query + broadcast_to(first, o.first_query.dims()) : first;
    if (o.query_segments) o.query_segments = part(o.query_segments);
    const Tensor q_part = part(q);
    TileAttention a = call_of(q_part, k, o);
    a.part_of_queries = true;
    a.adds_to_keys = from > 0;
    const AttentionGradient g = gradient_of(a, q_part, k, v, part(y), part(lse, 2), part(dy), o, &sums);
    dqs.push_back(g.q);
    if (g.key_bias) all.key_bias = all.key_bias ? all.key_bias + g.key_bias : g.key_bias;
    if (end < queries) continue;
    all.k = key_gradient(a, sums.k, q.dim(3));
    all.v = key_gradient(a, sums.v, q.dim(3));
  }
  all.q = concatenate(dqs, 1);
  return all;
}

}  // namespace

AttentionGradient tile_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                          const LocalAttention& requested) {
  const LocalAttention options = searched(q, k, requested, /*gradient=*/true);
  return gradient_of(call_of(q, k, options), q, k, v, y, lse, dy, options);
}

namespace {

AttentionGradient gradient_of(const TileAttention& a, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                              const LocalAttention& options, KeySums* sums) {
  using Fused = AttentionBlocks::Fused;
  bool fused = a.blocks.fused_gradient != Fused::no;
  const auto of_kind = [](TileGradient kind) {
    return [kind](const TileAttention& of) { return tile_gradient_program(of, kind); };
  };
  if (fused) {
    const int64_t need = tile_gradient_program(a, TileGradient::fused).fast_memory();
    if (need > a.chip.fast_memory) {
      check(
          a.blocks.fused_gradient == Fused::automatic, Code::invalid_config,
          "flash_block_sizes: use_fused_bwd_kernel is true; for {} queries it takes {} MiB of fast memory, expected at "
          "most {} MiB; false needs less",
          a.queries, need >> 20, a.chip.fast_memory >> 20);
      if (const int64_t parts = parts_of_queries(a)) return gradient_in_parts(parts, q, k, v, y, lse, dy, options);
      fused = false;
    }
  }
  const DType wide = DType::f32;
  dy = cast(dy, a.type);
  // A row without keys has an arbitrary, very small log-sum-exp: replacing it gives its logits zero weight.
  Tensor logs = lse * kLog2e;
  logs = where(lt(logs, scalar_like(logs, kMasked * 1e-3)), full(logs.graph(), -kMasked, logs.shape()), logs);
  Tensor slopes = transpose(sum(cast(y, wide) * cast(dy, wide), {-1}), {0, 2, 1});
  const double work = 2.0 * static_cast<double>(a.batch * a.heads * a.head_dim) * static_cast<double>(a.queries) *
                      static_cast<double>(a.keys);
  const auto run = [&](TileGradient kind) {
    const bool of_keys = kind != TileGradient::dq;
    const int64_t bq = of_keys ? a.blocks.gradient_queries : a.blocks.dq_queries,
                  bk = of_keys ? a.blocks.gradient_keys : a.blocks.dq_keys, lq = round_up(a.queries, bq),
                  lk = round_up(a.keys, bk);
    std::vector<Tensor> in;
    if (a.limited) in.push_back(limits_of(q.graph(), a, options));
    for (const auto& [x, length] : {std::pair{q, lq}, {k, lk}, {v, lk}, {dy, lq}})
      in.push_back(to_kernel(a, x, length));
    for (Tensor x : {logs, slopes}) in.push_back(reshape(pad_end(x, 2, lq), {a.batch, a.heads, lq / bq, 1, bq}));
    if (a.key_bias) in.push_back(to_line(a, options.key_bias * kLog2e, lk, bk, true));
    if (a.segments) {
      in.push_back(to_line(a, options.query_segments, lq, bq, false));
      in.push_back(to_line(a, options.key_segments, lk, bk, true));
    }
    if (a.adds_to_keys) in.insert(in.end(), {sums->k, sums->v});
    return tiles::call(tile_gradient_program(a, kind), in, kind == TileGradient::dq ? work : (fused ? 4 : 3) * work);
  };
  if (!fused) {
    check_fits(a, "block_q_dkv", &AttentionBlocks::gradient_queries, of_kind(TileGradient::dkv));
    check_fits(a, "block_q_dq", &AttentionBlocks::dq_queries, of_kind(TileGradient::dq));
  }
  std::vector<Tensor> out;
  if (fused) {
    out = run(TileGradient::fused);
  } else {
    out = run(TileGradient::dq);
    for (Tensor t : run(TileGradient::dkv)) out.push_back(t);
  }
  AttentionGradient g{from_kernel(a, out[0], q.dims()), {}, {}};
  if (sums) {
    *sums = {out[1], out[2]};
  } else {
    g.k = key_gradient(a, out[1], q.dim(3));
    g.v = key_gradient(a, out[2], q.dim(3));
  }
  if (a.key_bias) {
    const int64_t length = out[3].dim(2) * out[3].dim(4);
    g.key_bias = slice_axis(reshape(sum(out[3], {1}), {a.batch, length}), 1, 0, a.keys);
  }
  return g;
}

}  // namespace

}  // namespace md
