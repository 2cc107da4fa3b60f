// The key logical_axis_rules of the reference's configs for Wan (configs/base_wan_14b.yml).
#pragma once

namespace md {

inline constexpr const char* kWanAxisRules = R"([
  ['batch', ['data', 'fsdp']], ['activation_batch', ['data', 'fsdp']],
  ['activation_self_attn_heads', ['context', 'tensor']], ['activation_cross_attn_q_length', ['context', 'tensor']],
  ['activation_length', 'context'], ['activation_heads', 'tensor'], ['mlp', 'tensor'], ['embed', ['context', 'fsdp']],
  ['heads', 'tensor'], ['norm', 'tensor'], ['conv_batch', ['data', 'context', 'fsdp']], ['out_channels', 'tensor'],
  ['conv_out', 'context']])";

}  // namespace md
