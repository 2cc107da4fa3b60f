#include "maxdiffusion/ops/attention_search.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/round_up.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {
namespace {

/// The sizes that one kernel reads, by the names of flash_block_sizes.
struct Names {
  struct {
    const char* key;
    int64_t AttentionBlocks::*size;
  } queries, keys, compute;
};
constexpr Names kForward{{"block_q", &AttentionBlocks::queries},
                         {"block_kv", &AttentionBlocks::keys},
                         {"block_kv_compute", &AttentionBlocks::keys_compute}},
    kGradient{{"block_q_dkv", &AttentionBlocks::gradient_queries},
              {"block_kv_dkv", &AttentionBlocks::gradient_keys},
              {"block_kv_dkv_compute", &AttentionBlocks::gradient_keys_compute}};

const Names& names_of(bool gradient) { return gradient ? kGradient : kForward; }

std::string shown_sizes(const AttentionBlocks& b, bool gradient) {
  const Names& n = names_of(gradient);
  return fmt::format("{}: {}, {}: {}, {}: {}", n.queries.key, b.*n.queries.size, n.keys.key, b.*n.keys.size,
                     n.compute.key, b.*n.compute.size);
}

/// Sizes to try for an axis of this length; one that is set stays alone.
std::vector<int64_t> ladder(int64_t set, int64_t length, bool full) {
  if (set > 0) return {set};
  std::vector<int64_t> sizes;
  const int64_t most = round_up(length, int64_t{256});
  for (int64_t size = 256; size <= (full ? 4096 : 2048) && size <= most; size = full ? size + 256 : size * 2)
    sizes.push_back(size);
  return sizes;
}

bool fits(const TileAttention& a, bool gradient) {
  const auto need = [&](TileGradient kind) { return tile_gradient_program(a, kind).fast_memory(); };
  const int64_t have = a.chip.fast_memory;
  if (!gradient) return tile_attention_program(a).fast_memory() <= have;
  // Where the kernel for all gradients does not fit, others take its place (attention_tiles.cc).
  return a.blocks.fused_gradient == AttentionBlocks::Fused::yes
             ? need(TileGradient::fused) <= have
             : std::max(need(TileGradient::dq), need(TileGradient::dkv)) <= have;
}

/// Attention alone, of one device.
void build(Graph& g, const TileAttention& a, const AttentionBlocks& blocks, bool gradient) {
  const Shape of_q{a.type, {a.batch, a.queries, a.heads, a.head_dim}},
      of_k{a.type, {a.batch, a.keys, a.kv_heads, a.head_dim}};
  LocalAttention o{.scale = a.scale,
                   .precision = a.exact ? Precision::highest : Precision::default_,
                   .blocks = blocks,
                   .causal = a.causal};
  if (a.limited) o.lengths = full(g, static_cast<double>(a.keys), {DType::s32, {a.batch}});
  if (a.key_bias) o.key_bias = full(g, 0, {DType::f32, {a.batch, a.keys}});
  if (a.segments) {
    o.query_segments = full(g, 0, {DType::s32, {a.batch, a.queries}});
    o.key_segments = full(g, 0, {DType::s32, {a.batch, a.keys}});
  }
  const Tensor q = g.input("q", of_q), k = g.input("k", of_k), v = g.input("v", of_k);
  if (!gradient) {
    g.output("y", tile_attention(q, k, v, o).y);
    return;
  }
  const Tensor lse = g.input("lse", {DType::f32, {a.batch, a.heads, a.queries}});
  const AttentionGradient d = tile_attention_gradient(q, k, v, g.input("y", of_q), lse, g.input("dy", of_q), o);
  g.output("dq", d.q);
  g.output("dk", d.k);
  g.output("dv", d.v);
}

std::string describe(const TileAttention& a, bool gradient) {
  return fmt::format("{} of {} queries and {} keys, {} heads of {} values, batch {}, {}",
                     gradient ? "attention's gradient" : "attention", a.queries, a.keys, a.heads, a.head_dim, a.batch,
                     to_string(a.type));
}

AttentionBlocks measure(const GraphOptions& device, const TileAttention& a, bool gradient) {
  const BlockSearch& search = *a.blocks.search;
  const std::vector<AttentionBlocks> tried = block_candidates(a, blocks_of_chip(device.device_kind), gradient);
  const Names& n = names_of(gradient);
  std::string csv = fmt::format("{},{},{},seconds\n", n.queries.key, n.keys.key, n.compute.key);
  std::optional<std::pair<double, AttentionBlocks>> best;
  std::exception_ptr last;
  double usual = 0;
  for (size_t i = 0; i < tried.size(); ++i) {
    const AttentionBlocks& b = tried[i];
    std::string result;
    try {
      GraphOptions alone = device;
      alone.mesh_axes.clear();
      alone.resolve = nullptr;
      Graph g(alone);
      build(g, a, b, gradient);
      const double seconds = device.measure(g, search.runs);
      if (i == 0) usual = seconds;
      if (!best || seconds < best->first) best = {seconds, b};
      csv += fmt::format("{},{},{},{:.9f}\n", b.*n.queries.size, b.*n.keys.size, b.*n.compute.size, seconds);
      result = fmt::format("{:.3f} ms", seconds * 1e3);
    } catch (const Error& e) {
      last = std::current_exception();
      csv += fmt::format("{},{},{},\n", b.*n.queries.size, b.*n.keys.size, b.*n.compute.size);
      result = e.what();
    }
    log_info("tile search {} of {}: {}: {}", i + 1, tried.size(), shown_sizes(b, gradient), result);
  }
  if (!search.folder.empty()) {
    make_folders(search.folder);
    write_file_atomic(fmt::format("{}/{}_{}x{}x{}x{}.csv", search.folder, gradient ? "gradient" : "attention",
                                  a.queries, a.keys, a.heads, a.head_dim),
                      csv);
  }
  if (!best) std::rethrow_exception(last);
  log_info("tile search: {}: flash_block_sizes: {{{}}} take {:.3f} ms{}", describe(a, gradient),
           shown_sizes(best->second, gradient), best->first * 1e3,
           usual > 0 ? fmt::format(", the defaults {:.3f} ms", usual * 1e3) : "");
  return best->second;
}

}  // namespace

std::vector<AttentionBlocks> block_candidates(const TileAttention& a, const AttentionBlocks& usual, bool gradient) {
  const Names& n = names_of(gradient);
  const bool full = a.blocks.search && a.blocks.search->full;
  std::vector<AttentionBlocks> tried;
  const auto add = [&](const AttentionBlocks& blocks) {
    TileAttention with = a;
    with.blocks = blocks;
    const AttentionBlocks all = tile_blocks(with);  // the kernel's sizes: other blocks may give the same
    with.blocks = a.blocks;
    with.blocks.search = nullptr;
    for (const auto& size : {n.queries, n.keys, n.compute}) with.blocks.*size.size = all.*size.size;
    if (std::ranges::find(tried, with.blocks) == tried.end() && fits(with, gradient)) tried.push_back(with.blocks);
  };
  AttentionBlocks set = a.blocks;
  set.search = nullptr;
  add(set == AttentionBlocks() ? usual : set);
  for (int64_t q : ladder(a.blocks.*n.queries.size, a.queries, full))
    for (int64_t k : ladder(a.blocks.*n.keys.size, a.keys, full))
      for (int64_t compute : ladder(a.blocks.*n.compute.size, std::min<int64_t>(a.keys, 1024), full)) {
        if (k % compute != 0) continue;
        AttentionBlocks b = a.blocks;
        b.*n.queries.size = q, b.*n.keys.size = k, b.*n.compute.size = compute;
        add(b);
      }
  return tried;
}

AttentionBlocks searched_blocks(const GraphOptions& device, const TileAttention& a, bool gradient) {
  AttentionBlocks result = a.blocks;
  result.search = nullptr;
  if (!a.blocks.search) return result;
  if (!device.measure) {
    log_line_once(LogLevel::warning,
                  "enable_tile_search: block sizes are measured by one process on devices that it has; here they are "
                  "the defaults; try: the flash_block_sizes that a run of one process, or tune attention, prints");
    return result == AttentionBlocks() ? blocks_of_chip(device.device_kind) : result;
  }
  const Names& n = names_of(gradient);
  if (result.*n.queries.size > 0 && result.*n.keys.size > 0 && result.*n.compute.size > 0) return result;
  static std::mutex mutex;
  static std::map<std::string, AttentionBlocks> known;
  const std::lock_guard lock(mutex);
  const std::string key =
      fmt::format("{}, {} kv heads, {}, {}", describe(a, gradient), a.kv_heads, shown_sizes(result, gradient),
                  std::vector<int>{a.causal, a.exact, a.limited, a.key_bias, a.segments,
                                   static_cast<int>(result.fused_gradient), a.blocks.search->full});
  if (!known.contains(key)) known[key] = measure(device, a, gradient);
  const AttentionBlocks& best = known[key];
  for (const auto& size : {n.queries, n.keys, n.compute}) result.*size.size = best.*size.size;
  return result;
}

}  // namespace md
